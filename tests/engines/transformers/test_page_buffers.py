"""Pages that are tensors of torch, handed to the client as they are."""

import pytest
import torch

from kvwarehouse import UsageError
from kvwarehouse.client.buffers import page_rows


def test_tensor_of_torch_is_shared_without_importing_it() -> None:
    tensor = torch.zeros((3, 8), dtype=torch.uint8)
    page_rows(tensor, 8, writable=True)[2] = 9
    assert tensor[2].tolist() == [9] * 8
    with pytest.raises(UsageError, match=r"meta|device|host"):
        page_rows(torch.zeros((3, 8), dtype=torch.uint8, device="meta"), 8, writable=True)

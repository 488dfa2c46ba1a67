"""Where the pages of a host pool lie, and the self-test; on a model of SGLang's pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_connectors.sglang.memory import page_numbers, piece_memory
from kvwarehouse_connectors.sglang.self_test import layout_self_test
from testkit.host_pools import ModelPool, ModelTensor


def test_pages_that_do_not_lie_at_equal_distances_are_refused() -> None:
    class Uneven(ModelPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            addresses, sizes = super().get_page_buffer_meta(indices)
            return [a + 2 * (int(indices[0]) >= 24) for a in addresses], sizes

    with pytest.raises(kvw.UsageError, match="equal distances"):
        piece_memory(Uneven("page_first"), 1)


def test_addresses_outside_the_pool_are_refused() -> None:
    class Beyond(ModelPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            addresses, sizes = super().get_page_buffer_meta(indices)
            return [address + self.array.nbytes for address in addresses], sizes

    with pytest.raises(kvw.UsageError, match="outside its tensors"):
        piece_memory(Beyond("page_first"), 1)


def test_a_pool_that_tells_no_addresses_or_cannot_be_cut_is_refused() -> None:
    class Silent(ModelPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            return None

    class Older(ModelPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise ValueError("Unsupported layout: page_first")

    for pool in (Silent("page_first"), Older("page_first")):
        with pytest.raises(kvw.UsageError, match="tells no addresses"):
            piece_memory(pool, 1)
    with pytest.raises(kvw.UsageError, match="cannot be cut into 2 groups"):
        piece_memory(ModelPool("page_first"), 2)


def test_pages_are_whole_runs_of_slots() -> None:
    assert page_numbers(np.array([8, 9, 10, 11, 0, 1, 2, 3]), 2, 4, 3).tolist() == [2, 0]
    for slots in ([8, 9, 11, 10], [9, 10, 11, 12], [12, 13, 14, 15], [8, 9, 10]):
        with pytest.raises(kvw.UsageError):
            page_numbers(np.array(slots), 1, 4, 3)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_the_self_test_passes_and_leaves_the_pool_as_it_was(layout: str, seed: int) -> None:
    pool = ModelPool(layout)
    pool.fill(seed)
    before = pool.array.copy()
    assert layout_self_test(pool, piece_memory(pool, 2 if layout == "page_head" else 1))
    assert (pool.array == before).all()
    assert pool.alloc(pool.size) is not None, "the page was not given back"


def test_the_self_test_is_left_out_where_no_page_is_free() -> None:
    pool = ModelPool("page_first")
    assert pool.alloc(pool.size) is not None
    assert not layout_self_test(pool, piece_memory(pool, 1))


def test_the_self_test_finds_a_pool_that_reads_its_pages_otherwise() -> None:
    class Reversed(ModelPool):
        def get_data_page(self, index: int, flat: bool = True) -> ModelTensor:
            return ModelTensor(super().get_data_page(index).array[::-1].copy())

    class Elsewhere(ModelPool):
        def set_from_flat_data_page(self, index: int, data_page: ModelTensor) -> None:
            super().set_from_flat_data_page(index + self.page_size, data_page)

    class Swapped(ModelPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            return super().get_page_buffer_meta((np.asarray(indices) + 4) % self.size)

    for pool in (Reversed("page_first"), Elsewhere("page_first"), Swapped("page_first")):
        with pytest.raises(kvw.UsageError, match=r"outside|equal distances|self-test"):
            layout_self_test(pool, piece_memory(pool, 1))

"""SGLang's own device and host pools, small, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 16
TOKENS = 512
"""Of the device pool; the host pool has as many and a page."""
LAYERS = 3


@dataclass(frozen=True)
class Shape:
    """kind: mha or mla. heads: of this rank. layout: of the host pool."""

    layout: str = "page_first"
    kind: str = "mha"
    heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16


def device_pool(shape: Shape) -> Any:
    common: dict[str, Any] = {
        "size": TOKENS,
        "page_size": PAGE,
        "dtype": shape.dtype,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if shape.kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=48, qk_rope_head_dim=16, **common)
    return MHATokenToKVPool(
        head_num=shape.heads, head_dim=shape.head_dim, enable_alt_stream=False, **common
    )


def host_pool(shape: Shape, device: Any) -> Any:
    common: dict[str, Any] = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": shape.layout,
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": TOKENS,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    if shape.kind == "mla":
        info = device._mla_buffer_info()
        return MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **common)
    return MHATokenToKVPoolHost(device._mha_buffer_info(), **common)


def tensors(host: Any) -> list[torch.Tensor]:
    """Those that hold a host pool's pages."""
    held = host.kv_buffer
    return list(held) if isinstance(held, list | tuple) else [held]


def fill(host: Any, seed: int) -> None:
    """With noise, bit by bit: any number is as good as another."""
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    for tensor in tensors(host):
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))


def fill_pages(host: Any, slots: torch.Tensor, seed: int) -> None:
    """Whole pages, each with noise of its own that does not depend on where it lies, written by
    SGLang's own means; one layout has none."""
    for number, slot in enumerate(slots.tolist()[:: host.page_size]):
        generator = torch.Generator().manual_seed((seed * 1009 + number) % (1 << 62))
        page = torch.randint(
            0, 256, (host.page_size * host.size_per_token,), generator=generator, dtype=torch.uint8
        )
        if host.layout == "page_unified":
            host.kv_buffer[slot // host.page_size].view(-1).view(torch.uint8).copy_(page)
        else:
            host.set_from_flat_data_page(slot, page.view(host.dtype))


def wipe(host: Any) -> None:
    for tensor in tensors(host):
        tensor.zero_()


def content(host: Any, indices: torch.Tensor) -> list[bytes]:
    """Of each page of these slots, read by SGLang's own means; one layout has none."""
    pages = indices.tolist()[:: host.page_size]
    if host.layout == "page_unified":
        found = [host.kv_buffer[page // host.page_size] for page in pages]
    else:
        found = [host.get_data_page(page) for page in pages]
    return [page.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for page in found]

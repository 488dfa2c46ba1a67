"""Both ways of moving pages write the same bytes, and the bytes docs/transformers.md describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

from kvwarehouse_connectors.core import PageGeometry
from kvwarehouse_connectors.transformers import PrefillOptions, RoomyCache, WarehousePrefill
from kvwarehouse_connectors.transformers.support import CacheShape, observe
from kvwarehouse_connectors.transformers.transfer import (
    DirectTransfer,
    StagedTransfer,
    Transfer,
)

TOKENS = np.arange(80)
TIMEOUT_S = 1.0

Way = Callable[[PageGeometry], Transfer]
WAYS: dict[str, Way] = {
    "direct": DirectTransfer,
    # Batches of 2, 2 and 1 pages.
    "staged": lambda geometry: StagedTransfer(geometry, 2 * geometry.page_bytes),
}


@dataclass(frozen=True)
class Shelf:
    """A namespace in the warehouse, and caches of its shape."""

    space: kvw.OpenNamespace
    shape: CacheShape
    geometry: PageGeometry
    config: Any

    def cache(self, fill: Callable[[Any], Any]) -> RoomyCache:
        cache = RoomyCache(self.config, self.shape, 100)
        for room in cache.rooms:
            fill(room)
        cache.show(80)
        return cache


@pytest.fixture
def shelf(model: Any, warehouse: Any) -> Shelf:
    found = observe(model)
    # Keys and values of different sizes: an order that mixes them up must not pass.
    shape = CacheShape(((2, 16, 3, 8), (1, 24, 2, 16)), found.dtype, found.device, True)
    geometry = PageGeometry(shape.planes, 16)
    space = kvw.Namespace(
        model="m",
        weights="w",
        dtype="bfloat16",
        layout="transformers/1",
        page_tokens=16,
        page_bytes=geometry.page_bytes,
    )
    return Shelf(warehouse.open(space), shape, geometry, model.config)


def expected_page(torch: Any, cache: RoomyCache, page: int) -> bytes:
    """The layout in words: layer by layer keys then values, each [heads, page_tokens, size]."""
    parts = []
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            part = tensor[0, :, page * 16 : (page + 1) * 16].contiguous()
            parts.append(part.view(torch.uint8).numpy().tobytes())
    return b"".join(parts)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_page_bytes_are_layer_by_layer_keys_then_values(
    torch: Any, warehouse: Any, shelf: Shelf, way: Way
) -> None:
    cache = shelf.cache(lambda room: room.normal_())
    stored = way(shelf.geometry).store(shelf.space, TOKENS, cache.rooms, 0, TIMEOUT_S)
    assert stored.stored == 5
    pages = [expected_page(torch, cache, page) for page in range(5)]
    assert list(warehouse.pages.values()) == pages


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("loads", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("stores", WAYS.values(), ids=WAYS)
def test_pages_come_back_as_they_were_stored_and_nothing_else_is_written(
    torch: Any, shelf: Shelf, stores: Way, loads: Way, first: int
) -> None:
    written = shelf.cache(lambda room: room.normal_())
    storing, loading = stores(shelf.geometry), loads(shelf.geometry)
    storing.store(shelf.space, TOKENS[: first * 16], written.rooms, 0, TIMEOUT_S)
    storing.store(shelf.space, TOKENS, written.rooms, first, TIMEOUT_S)
    read = shelf.cache(lambda room: room.fill_(7))
    assert loading.load(shelf.space, TOKENS, read.rooms, TIMEOUT_S) == 5
    for got, put in zip(read.rooms, written.rooms, strict=True):
        assert torch.equal(got[:, :, :80], put[:, :, :80])
        assert bool((got[:, :, 80:] == 7).all())


def test_staged_load_stops_at_a_short_batch(warehouse: Any, shelf: Shelf) -> None:
    staged = WAYS["staged"](shelf.geometry)
    cache = shelf.cache(lambda room: room.normal_())
    staged.store(shelf.space, TOKENS, cache.rooms, 0, TIMEOUT_S)
    warehouse.most = 1
    assert staged.load(shelf.space, TOKENS, cache.rooms, TIMEOUT_S) == 1


def test_prefill_through_staging_equals_direct_bit_for_bit(
    torch: Any, model: Any, warehouse: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PrefillOptions(page_tokens=16, chunk_tokens=32)
    with WarehousePrefill(model, warehouse, weights="tiny", options=options) as prefiller:
        computed = prefiller.prefill(prompt)
        assert prefiller.flush()
        monkeypatch.setattr(prefiller, "_transfer", StagedTransfer(prefiller._geometry))
        reused = prefiller.prefill(prompt)
    assert reused.tokens_loaded == 128
    assert torch.equal(computed.logits, reused.logits)

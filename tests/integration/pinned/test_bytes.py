"""Blocks of an engine's paged cache on a GPU, straight to and from the arena, byte for byte: the
connectors' part that needs no engine, over a real daemon and the contract model of CUDA's driver.
It needs no GPU: tests/gpu has the same on torch's tensors.
"""

from __future__ import annotations

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_connectors.core.page_run import PageRun
from pinned_parts.cache import ITEM_BYTES, LAYOUTS
from pinned_parts.rig import TIMEOUT_S, Make

pytestmark = pytest.mark.usefixtures("contract_kept")


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_go_out_and_come_back_byte_for_byte_past_host_memory(
    make: Make, name: str, dtype: str
) -> None:
    rig = make(name, dtype)
    before = rig.cache.pages()
    run = rig.run(7, 0, 3)
    assert rig.store_queue.put([run], rig.space, rig.memory)
    assert rig.stored() == [kvw.StoreResult(3, 0, {})]
    assert np.array_equal(rig.on_host(run), before[run.blocks])
    rig.wipe()
    back = PageRun(0, run.keys, [1, 8, 4], True)
    rig.memory.after_engine()
    assert rig.memory.load(rig.opened, back, 0, 0, TIMEOUT_S) == 3
    after = rig.cache.pages()
    assert np.array_equal(after[[1, 8, 4]], before[run.blocks])
    assert not after[[0, 2, 3, 5, 6, 7]].any(), "nothing else was written"
    assert (rig.buffer.gathers, rig.buffer.loads) == (0, 0)


def test_groups_of_two_layouts_share_one_way_and_each_has_its_bytes(make: Make) -> None:
    """As in a hybrid model."""
    rigs = [make("HND", "bfloat16"), make("MLA", "int8")]
    rigs[1].memory._copies = rigs[0].copies
    before = [rig.cache.pages() for rig in rigs]
    runs = [rig.run(2, 5) for rig in rigs]
    for rig, run in zip(rigs, runs, strict=True):
        assert rig.store_queue.put([run], rig.space, rig.memory)
    for rig, run, pages in zip(rigs, runs, before, strict=True):
        rig.stored()
        assert np.array_equal(rig.on_host(run), pages[run.blocks])


def test_load_goes_on_behind_what_has_come(make: Make) -> None:
    rig = make()
    before = rig.cache.pages()
    run = rig.run(0, 1, 2, 3)
    rig.store_queue.put([run.cut(0, 2)], rig.space, rig.memory)
    rig.stored()
    rig.wipe()
    assert rig.memory.load(rig.opened, run, 0, 0, 0.0) == 2
    rig.cache.memories[0].fill(np.zeros(rig.cache.memories[0].size_bytes, np.uint8))
    late = rig.opened.store(keys=run.key_runs(2), pages=before[[2, 3]])
    assert late.stored == 2
    assert rig.memory.load(rig.opened, run, 2, 0, TIMEOUT_S) == 2
    assert np.array_equal(rig.cache.pages()[[2, 3]], before[[2, 3]])

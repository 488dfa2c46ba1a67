"""The self-tests: they pass where blocks keep their bytes, and fail where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.layout_self_test import check_tensors
from kvwarehouse_connectors.core.memory import HostMemory
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.self_test import SelfTest
from vllm_parts.tensors import Caches, caches, laid_out, shapes

BLOCKS = 9
QUICK = ConnectionOptions(tick_s=0.01)


@pytest.fixture(scope="module")
def daemon() -> Iterator[kvw.PrivateDaemon]:
    with kvw.PrivateDaemon({"dram": "32MiB"}) as daemon:
        yield daemon


@pytest.fixture
def connection(daemon: kvw.PrivateDaemon) -> Iterator[DaemonConnection]:
    connection = DaemonConnection(daemon.address, QUICK)
    yield connection
    connection.close()


@pytest.fixture
def nobody() -> Iterator[DaemonConnection]:
    """No daemon, now or ever."""
    connection = DaemonConnection("unix:///tmp/kvw-no-such-daemon/kvw.sock", QUICK)
    yield connection
    connection.close()


@pytest.fixture
def cache() -> Caches:
    torch.manual_seed(1)
    return caches(shapes()["three layers"], KVCacheLayout.LBHNC, BLOCKS)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [pytest.param(shape, layout, id=f"{shape}-{layout.name}") for shape, layout in laid_out()],
)
@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("blocks", [2, 3, BLOCKS])
def test_right_layout_passes_and_every_byte_is_as_before(
    shape: str, layout: KVCacheLayout, kind: str, blocks: int, nobody: DaemonConnection
) -> None:
    cache = caches(shapes()[shape], layout, blocks)
    before = cache.memory.copy()
    for group in range(len(cache.config.kv_cache_groups)):
        check_tensors(getattr(cache, kind)(group), cache.views(group), cache.blocks)
    assert np.array_equal(before, cache.memory)


def shifted(layout: BlockLayout) -> BlockLayout:
    return replace(layout, bases=layout.bases + np.uint64(2))


def next_layers(layout: BlockLayout) -> BlockLayout:
    """Twice the same layer, never the last."""
    bases = layout.bases.copy()
    bases[-1] = bases[0]
    return replace(layout, bases=bases)


def shorter(layout: BlockLayout) -> BlockLayout:
    return replace(layout, piece_bytes=layout.piece_bytes - np.uint64(2))


def stretched(layout: BlockLayout) -> BlockLayout:
    """Blocks twice as far apart."""
    return replace(layout, strides=layout.strides * 2)


def block_beside(layout: BlockLayout) -> BlockLayout:
    return replace(layout, bases=layout.bases + layout.strides.astype(np.uint64))


def longer(layout: BlockLayout) -> BlockLayout:
    """Each piece reaches into the block after it."""
    return replace(layout, piece_bytes=layout.piece_bytes + np.uint64(16))


_LONGER = "blocks beside are written with what was read of them a moment ago: nothing shows"


@pytest.mark.parametrize(
    "wrong",
    [
        shifted,
        next_layers,
        shorter,
        stretched,
        block_beside,
        pytest.param(longer, marks=pytest.mark.xfail(reason=_LONGER)),
    ],
)
def test_wrong_layout_is_refused_and_the_blocks_are_as_before(
    wrong: Callable[[BlockLayout], BlockLayout], nobody: DaemonConnection
) -> None:
    """In memory of its own with room on both sides, so that a wrong address harms nobody."""
    torch.manual_seed(1)
    cache = caches(shapes()["three layers"], KVCacheLayout.BLHNC, 4 * BLOCKS)
    views = [view[:BLOCKS] for view in cache.views()]
    memory = HostMemory(wrong(cache.layout()))
    before = [cache.page(block) for block in range(BLOCKS)]
    with pytest.raises(kvw.UsageError, match="does not give back the bytes") as refused:
        check_tensors(memory, views, BLOCKS)
    assert refused.value.code == "unsupported"
    changed = [b for b in range(BLOCKS) if not np.array_equal(before[b], cache.page(b))]
    assert not {1, BLOCKS // 2, BLOCKS - 1} & set(changed)


class Meddled(HostMemory):
    """Loads whatever it is told to, then changes a byte: a copy that went wrong."""

    def __init__(self, layout: BlockLayout, *, harm: bool) -> None:
        super().__init__(layout)
        self.harm = harm
        self.loads = 0

    def load(
        self, space: kvw.OpenNamespace, run: PageRun, begin: int, shard: int, timeout_s: float
    ) -> kvw.Loaded:
        loaded = super().load(space, run, begin, shard, timeout_s)
        self.loads += 1
        if self.harm:
            row = np.zeros((1, self.block_bytes), np.uint8)
            self.gather([run.blocks[-1]], row)
            row[0, -1] ^= 1
            self.scatter([run.blocks[-1]], row)
        return loaded


def test_round_trip_is_made_once(connection: DaemonConnection, cache: Caches) -> None:
    self_test = SelfTest(connection, stores=True)
    memory = Meddled(cache.layout(), harm=False)
    assert self_test.round_trip(memory, [3, 5, 7])
    assert self_test.round_trip(memory, [3, 5, 7])
    assert memory.loads == 1


def test_round_trip_that_changes_a_byte_is_refused_for_good(
    connection: DaemonConnection, cache: Caches, caplog: pytest.LogCaptureFixture
) -> None:
    self_test = SelfTest(connection, stores=True)
    memory = Meddled(cache.layout(), harm=True)
    assert not self_test.round_trip(memory, [3, 5])
    memory.harm = False
    assert not self_test.round_trip(memory, [3, 5])
    assert memory.loads == 1
    assert "came back with other bytes" in caplog.text


def test_round_trip_of_one_group_says_nothing_of_another(
    connection: DaemonConnection, cache: Caches
) -> None:
    self_test = SelfTest(connection, stores=True)
    bad, good = Meddled(cache.layout(), harm=True), Meddled(cache.layout(), harm=False)
    assert not self_test.round_trip(bad, [3, 5])
    assert self_test.round_trip(good, [3, 5])


def test_round_trip_is_made_through_a_buffer_too(
    connection: DaemonConnection, cache: Caches
) -> None:
    assert SelfTest(connection, stores=True).round_trip(cache.device(), [3, 5])


def test_round_trip_counts_as_not_asked_without_a_daemon_and_is_made_when_there_is_one(
    daemon: kvw.PrivateDaemon, cache: Caches
) -> None:
    daemon.stop()
    connection = DaemonConnection(daemon.address, QUICK)
    try:
        self_test = SelfTest(connection, stores=True)
        memory = Meddled(cache.layout(), harm=True)
        assert self_test.round_trip(memory, [3, 5])
        assert memory.loads == 0
        daemon.start()
        eventually(lambda: connection.control() is not None, "the daemon was found")
        assert not self_test.round_trip(memory, [3, 5])
    finally:
        connection.close()


def test_round_trip_that_cannot_be_made_is_not_tried_for_ever(
    nobody: DaemonConnection, cache: Caches
) -> None:
    class Counted(DaemonConnection):
        asked = 0

        @property
        def client(self) -> kvw.Client | None:
            self.asked += 1
            return None

    counted = Counted("unix:///tmp/kvw-no-such-daemon/kvw.sock", QUICK)
    try:
        self_test = SelfTest(counted, stores=True)
        memory = Meddled(cache.layout(), harm=True)
        counted.asked = 0
        assert all(self_test.round_trip(memory, [3, 5]) for _ in range(50))
        assert counted.asked <= 10
    finally:
        counted.close()


def test_engine_that_may_not_store_makes_no_round_trip(
    connection: DaemonConnection, cache: Caches
) -> None:
    memory = Meddled(cache.layout(), harm=True)
    assert SelfTest(connection, stores=False).round_trip(memory, [3, 5])
    assert memory.loads == 0


def test_round_trip_uses_only_the_blocks_given(connection: DaemonConnection, cache: Caches) -> None:
    before = {block: cache.page(block) for block in range(BLOCKS)}
    assert SelfTest(connection, stores=True).round_trip(cache.host(), [3, 5, 7])
    after = {block: cache.page(block) for block in range(BLOCKS)}
    changed = [b for b in range(BLOCKS) if not np.array_equal(before[b], after[b])]
    assert set(changed) <= {3, 5}

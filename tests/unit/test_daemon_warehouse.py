"""The daemon's warehouse over a model of the core: what it asks of it, and when."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.daemon import ledger as ledger_module
from kvwarehouse.daemon.ledger import LOG_AHEAD, Ledger
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import CapacityError
from kvwarehouse.types import Namespace
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from testkit.fake_engine import FakeCore, FakeOptions


def space(number: int) -> Namespace:
    return Namespace(
        model=f"m{number}", weights="w", dtype="b", layout="l/1", page_tokens=4, page_bytes=8
    )


class BusyCore(FakeCore):
    """Refuses what is asked while it is busy."""

    busy = False

    def add_namespace(
        self, ordinal: int, id: bytes, page_tokens: int, shards: int, shard_bytes: int, epoch: int
    ) -> int:
        if self.busy:
            raise CapacityError("too many commands are waiting for the core", code="core_busy")
        return super().add_namespace(ordinal, id, page_tokens, shards, shard_bytes, epoch)


class SlowCore(FakeCore):
    """Its evictions take until they may end."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.evicts, self.may_end = threading.Event(), threading.Event()

    def evict(self, ordinal: int, pages: int, tiers: str) -> tuple[int, list[tuple[bytes, int]]]:
        self.evicts.set()
        assert self.may_end.wait(DEADLINE_S)
        return super().evict(ordinal, pages, tiers)


class WatchedCore(FakeCore):
    """Can be watched, and keeps the epochs that namespaces were added with."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.epochs: list[int] = []

    def add_namespace(
        self, ordinal: int, id: bytes, page_tokens: int, shards: int, shard_bytes: int, epoch: int
    ) -> int:
        self.epochs.append(epoch)
        return super().add_namespace(ordinal, id, page_tokens, shards, shard_bytes, epoch)

    def watch(self, ordinal: int, tokens_only: bool) -> int:
        return ordinal


class SlowDisk:
    """Of a ledger: from `keep_waiting` on, whoever writes waits until it `answers`."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ledger, self._patch = ledger, monkeypatch
        self.asked, self.answers = threading.Event(), threading.Event()

    def keep_waiting(self) -> None:
        for calls in self._ledger.calls.values():
            self._patch.setattr(calls, "wait_for", partial(self._wait_for, calls.wait_for))

    def _wait_for(self, wait_for: Callable[[Callable[[], Any]], Any], call: Any) -> Any:
        self.asked.set()
        assert self.answers.wait(DEADLINE_S)
        return wait_for(call)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger([str(tmp_path)], b"w" * 16, Log("json", io.StringIO()), expected=False)
    yield opened
    opened.close()


def test_core_that_is_busy_costs_no_namespace(ledger: Ledger) -> None:
    core: Any = BusyCore(FakeOptions())
    warehouse = DaemonWarehouse(core, ledger, Log("json", io.StringIO()))
    for number in range(3):
        warehouse.open_namespace(space(number))
    core.busy = True
    with pytest.raises(CapacityError) as caught:
        warehouse.open_namespace(space(3))
    assert caught.value.code == "core_busy"
    assert [record.space.model for record in ledger.namespaces()] == ["m0", "m1", "m2"]


def test_noted_end_of_the_log_stays_ahead_of_it_while_it_is_written(ledger: Ledger) -> None:
    core: Any = FakeCore(FakeOptions())
    warehouse = DaemonWarehouse(core, ledger, Log("json", io.StringIO()))
    core.end = 1
    for _ in range(20):
        warehouse.tend_tombstones()()
        core.end += LOG_AHEAD // 4
        assert ledger.log_end >= core.end
    assert ledger.log_end < core.end + 2 * LOG_AHEAD


def test_namespace_is_not_forgotten_while_it_is_evicted_from(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number would become another's; all else goes on."""
    monkeypatch.setattr(ledger_module, "MAX_NAMESPACES", 2)
    core: Any = SlowCore(FakeOptions())
    warehouse = DaemonWarehouse(core, ledger, Log("json", io.StringIO()))
    first, second = (warehouse.open_namespace(space(number)) for number in range(2))
    evicting = threading.Thread(target=warehouse.evict, args=(first, 1, "dram"))
    evicting.start()
    assert core.evicts.wait(DEADLINE_S)
    with pytest.raises(CapacityError) as caught:
        warehouse.clear(first, forget=True)
    assert caught.value.code == "namespace_in_use"
    warehouse.clear(second, forget=True)
    warehouse.open_namespace(space(2))
    opening = threading.Thread(target=warehouse.open_namespace, args=(space(3),))
    opening.start()  # there is room when the eviction has ended
    opening.join(0.05)
    assert {record.space.model for record in warehouse.namespaces()} == {"m0", "m2"}
    core.may_end.set()
    evicting.join(DEADLINE_S)
    opening.join(DEADLINE_S)
    assert {record.space.model for record in warehouse.namespaces()} == {"m2", "m3"}


@pytest.mark.parametrize("forget", [False, True], ids=["clear", "forget"])
def test_known_namespace_is_opened_and_watched_while_a_clear_waits_for_the_disk(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, forget: bool
) -> None:
    """Incident: who connected waited as long as the clear of another namespace."""
    core: Any = WatchedCore(FakeOptions())
    warehouse = DaemonWarehouse(core, ledger, Log("json", io.StringIO()))
    cleared, used = (warehouse.open_namespace(space(number)) for number in range(2))
    disk = SlowDisk(ledger, monkeypatch)
    disk.keep_waiting()
    with ThreadPoolExecutor(4) as threads:
        clearing = threads.submit(warehouse.clear, cleared, forget=forget)
        try:
            assert disk.asked.wait(DEADLINE_S)
            assert threads.submit(warehouse.open_namespace, used.space).result(DEADLINE_S) == used
            assert threads.submit(warehouse.watch, used).result(DEADLINE_S) == 1
            assert not clearing.done()
        finally:
            disk.answers.set()
        clearing.result(DEADLINE_S)
    assert [record.space for record in warehouse.namespaces()] == (
        [used.space] if forget else [cleared.space, used.space]
    )


def test_clear_reaches_the_core_after_the_ledger_whoever_opens_its_namespace_meanwhile(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core would take no page of it until the clear is written."""
    core: Any = WatchedCore(FakeOptions())
    warehouse = DaemonWarehouse(core, ledger, Log("json", io.StringIO()))
    cleared = warehouse.open_namespace(space(0))
    disk = SlowDisk(ledger, monkeypatch)
    disk.keep_waiting()
    with ThreadPoolExecutor(2) as threads:
        clearing = threads.submit(warehouse.clear, cleared)
        try:
            assert disk.asked.wait(DEADLINE_S)
            threads.submit(warehouse.open_namespace, cleared.space).result(DEADLINE_S)
            assert core.epochs == [0, 0]
        finally:
            disk.answers.set()
        clearing.result(DEADLINE_S)
    assert core.clears == [(0, 1)]


def test_namespace_that_is_being_forgotten_is_opened_as_a_new_one(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    core: Any = FakeCore(FakeOptions())
    warehouse = DaemonWarehouse(core, ledger, Log("json", io.StringIO()))
    record = warehouse.open_namespace(space(0))
    disk = SlowDisk(ledger, monkeypatch)
    forget = core.forget_namespace

    def forget_slowly(ordinal: int) -> bytes:
        gone = bytes(forget(ordinal))
        disk.keep_waiting()
        return gone

    monkeypatch.setattr(core, "forget_namespace", forget_slowly)
    with ThreadPoolExecutor(2) as threads:
        forgetting = threads.submit(warehouse.clear, record, forget=True)
        assert disk.asked.wait(DEADLINE_S)  # the core has it no more
        opening = threads.submit(warehouse.open_namespace, record.space)
        with pytest.raises(TimeoutError):
            opening.result(0.05)
        disk.answers.set()
        forgetting.result(DEADLINE_S)
        assert opening.result(DEADLINE_S).clear_epoch == ledger.floor == 2
    assert [each[0] for each in core.spaces.values()] == [record.space.id]

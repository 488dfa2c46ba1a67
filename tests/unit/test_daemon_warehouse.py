"""The daemon's warehouse over a model of the core: what it asks of it, and when."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
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
        warehouse.tend_tombstones()
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

"""The daemon's warehouse over a model of the core: what it asks of it, and when."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.daemon.ledger import LOG_AHEAD, Ledger
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import CapacityError
from kvwarehouse.types import Namespace
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

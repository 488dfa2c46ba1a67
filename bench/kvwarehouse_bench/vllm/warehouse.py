"""A private daemon beside an engine, and what a bench does to its pages. One owner.

Waits are bounded; one that ends without what it waited for raises CapacityError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_bench.harness.process import wait_for

_WAIT_S = 120.0
_EVICTED_AT_ONCE = 100_000


@dataclass(frozen=True)
class HeldPages:
    """Pages of engines, by tier; one in both tiers counts in both."""

    pages: int
    dram: int
    nvme: int


class EngineWarehouse:
    def __init__(self, client: kvw.Client, address: str) -> None:
        self.client = client
        self.address = address

    @property
    def direct(self) -> bool:
        """Whether reads and writes of NVMe pass the page cache by."""
        return bool(self._status()["tiers"]["nvme"]["direct_io"])

    def populated(self) -> bool:
        return bool(self._status()["tiers"]["dram"]["health"] != "populating")

    def held(self) -> HeldPages:
        pages = [page for space in self._spaces() for page in self.client.pages(space)]
        return HeldPages(
            len(pages),
            sum("dram" in page.tiers for page in pages),
            sum("nvme" in page.tiers for page in pages),
        )

    def clear(self) -> None:
        for space in self._spaces():
            self.client.clear(space)

    def wait_durable(self, pages: int) -> None:
        """Until `pages` pages are stored, and are on NVMe too."""
        self._wait(lambda: self.held().pages >= pages, f"{pages} pages stored")
        self.client.flush(_WAIT_S)
        self._wait(lambda: self.held().nvme >= pages, f"{pages} pages on NVMe")

    def only_on_nvme(self) -> None:
        """Takes every page out of DRAM. Those that a load was just bringing there, too."""

        def gone() -> bool:
            for space in self._spaces():
                self.client.evict(space, _EVICTED_AT_ONCE, "dram")
            return self.held().dram == 0

        self._wait(gone, "no page in DRAM")

    def read_bytes(self) -> int:
        """From NVMe, since the daemon's start."""
        return int(self._status()["tiers"]["nvme"]["read_bytes"])

    def _wait(self, met: Any, what: str) -> None:
        if not wait_for(met, _WAIT_S):
            raise kvw.CapacityError(
                f"not within {_WAIT_S:.0f} s: {what}; there are {self.held()}", code="bench_room"
            )

    def _spaces(self) -> list[kvw.Namespace]:
        found = [stored.space for stored in self.client.namespaces()]
        return [space for space in found if not space.model.startswith("kvwarehouse")]

    def _status(self) -> Any:
        return self.client.status()["core"]


@contextlib.contextmanager
def private_warehouse(
    folder: Path | None, dram_bytes: int, nvme_bytes: int, **settings: Any
) -> Iterator[EngineWarehouse]:
    """folder: of its NVMe tier; None: it has none. Returns when it has taken its memory: taking it
    would be measured too."""
    settings |= {"dram": dram_bytes}
    if folder is not None:
        settings |= {"nvme_dir": str(folder), "nvme_capacity": nvme_bytes}
        settings |= {"write_queue": dram_bytes}
    with kvw.PrivateDaemon(settings) as daemon, kvw.connect(daemon.address) as client:
        warehouse = EngineWarehouse(client, daemon.address)
        if not wait_for(warehouse.populated, _WAIT_S):
            raise kvw.CapacityError("the daemon has not taken its memory", code="bench_room")
        yield warehouse

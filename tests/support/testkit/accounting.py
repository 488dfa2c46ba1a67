"""Accounts kept of a daemon from outside: what its status says left and came, against what its
listing has. A difference is a page that was lost without being counted, or one that nobody stored.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvwarehouse.client import Client
from kvwarehouse.client.transport import shared_memory_of
from kvwarehouse_bench.harness.eventually import eventually
from testkit.reference_model import ReferenceModel

# Two snapshots this far apart with several ticks of the core between them.
_QUIET_S = 0.35


@dataclass(frozen=True)
class Snapshot:
    """One moment of a daemon: its status, and for each dictionary the nodes it lists by tier."""

    core: Mapping[str, Any]
    listed: tuple[dict[int, frozenset[str]], ...]

    @property
    def dram(self) -> Mapping[str, Any]:
        tier: Mapping[str, Any] = self.core["tiers"]["dram"]
        return tier

    @property
    def nvme(self) -> Mapping[str, Any]:
        tier: Mapping[str, Any] = self.core["tiers"]["nvme"]
        return tier

    def left(self) -> int:
        """Pages that left some tier, whatever the reason, since the daemon started."""
        return int(sum(self.dram["left"].values()) + sum(self.nvme["left"].values()))

    def in_dram_alone(self) -> int:
        return sum(had == {"dram"} for listed in self.listed for had in listed.values())

    def asked(self) -> int:
        """Pages asked for by lookups: hits of all tiers and misses."""
        lookups = dict(self.core["lookups"])
        del lookups["calls"]
        return int(sum(lookups.values()))


def quiet_snapshot(client: Client, books: Iterable[ReferenceModel]) -> Snapshot:
    """Waits until nothing moves by itself any more (write-behind, reclaim, evictions ahead of
    need), then takes a snapshot whose status and listing belong together."""
    books = tuple(books)
    last: list[Any] = []

    def settled() -> Snapshot | None:
        core = client.status()["core"]
        moving = _motion(core)
        if not last or last[0] != moving:
            last[:] = [moving, core["uptime_s"]]
            return None
        if core["uptime_s"] - last[1] < _QUIET_S or _busy(core):
            return None
        listed = tuple(_listed(client, book) for book in books)
        return Snapshot(core, listed) if _motion(client.status()["core"]) == moving else None

    return eventually(settled, "the daemon comes to rest")


def _motion(core: Mapping[str, Any]) -> Any:
    dram, nvme = core["tiers"]["dram"], core["tiers"]["nvme"]
    return (
        dict(dram["left"]),
        dict(nvme["left"]),
        core["index"]["pages"],
        dram["pages"],
        nvme["pages"],
        nvme["written_records"],
        nvme["relocated_records"],
        nvme["reclaimed_segments"],
    )


def _busy(core: Mapping[str, Any]) -> bool:
    nvme = core["tiers"]["nvme"]
    return bool(nvme["queued_records"] or nvme["promotions_in_flight"] or nvme["reads_in_flight"])


def _listed(client: Client, book: ReferenceModel) -> dict[int, frozenset[str]]:
    listed: dict[int, frozenset[str]] = {}
    for page in client.pages(book.space):
        node = book.node_of(page.key)
        assert node not in listed, f"node {node} is listed twice"
        assert book.path(node).index(node) == page.position
        listed[node] = frozenset(page.tiers)
    return listed


def check_sums(before: Snapshot, after: Snapshot, *, cleared: bool) -> None:
    """Between two snapshots of one daemon, pages in a tier are those before, plus those that came,
    less those counted as left."""
    sealed = after.core["stores"]["pages_sealed"] - before.core["stores"]["pages_sealed"]
    promoted = after.nvme["pages_promoted"] - before.nvme["pages_promoted"]
    left = sum(after.dram["left"].values()) - sum(before.dram["left"].values())
    assert after.dram["pages"] == before.dram["pages"] + sealed + promoted - left
    written = after.nvme["written_records"] - before.nvme["written_records"]
    left = sum(after.nvme["left"].values()) - sum(before.nvme["left"].values())
    most = before.nvme["pages"] + written - left
    # A record whose page was cleared while it was being written belongs to nobody.
    assert after.nvme["pages"] <= most if cleared else after.nvme["pages"] == most


def check_listing(snapshot: Snapshot, books: Iterable[ReferenceModel]) -> None:
    """Only pages that were stored are there, and the status counts the same ones."""
    listings = snapshot.listed
    for book, listed in zip(books, listings, strict=True):
        strangers = [node for node in listed if not book.possible(node)]
        assert not strangers, f"pages that nobody stored, or that were cleared: {strangers}"
    for tier, counted in (("dram", snapshot.dram), ("nvme", snapshot.nvme)):
        found = sum(tier in tiers for listed in listings for tiers in listed.values())
        assert found == counted["pages"], f"{tier}: {found} listed, {counted['pages']} counted"
    assert sum(len(listed) for listed in listings) == snapshot.core["index"]["pages"]


def check_owed(before: Snapshot, after: Snapshot, books: Iterable[ReferenceModel]) -> None:
    """What was reported stored is there, or counted as left; then forgives what has left."""
    missing = [
        [node for node in book.owed() if node not in listed]
        for book, listed in zip(books, after.listed, strict=True)
    ]
    count = sum(len(nodes) for nodes in missing)
    left = after.left() - before.left()
    assert count <= left, f"{count} stored pages are missing, {left} left by any count: {missing}"
    for book, nodes in zip(books, missing, strict=True):
        book.gone(nodes)


def check_survived(
    before: Snapshot, after: Snapshot, books: Iterable[ReferenceModel], tiers: Iterable[str]
) -> None:
    """After a restart: what was in one of `tiers` before it is there, or was counted by the new
    daemon as left."""
    wanted = frozenset(tiers)
    lost = [
        sorted(node for node, had in old.items() if had & wanted and node not in new)
        for old, new in zip(before.listed, after.listed, strict=True)
    ]
    count = sum(len(nodes) for nodes in lost)
    assert count <= after.left(), (
        f"{count} pages did not survive, {after.left()} left by the new daemon's count: {lost};"
        f" recovery: {after.core['recovery']}"
    )
    for book, listed in zip(books, after.listed, strict=True):
        book.gone([node for node in book.owed() if node not in listed])


def counters_of(client: Client) -> dict[str, int]:
    """Of a client over shared memory: its session's own, by name."""
    return shared_memory_of(client).native.counters()

"""From a daemon into a backup: what is stored when a namespace's turn comes, less what leaves
before it is read. One owner.

Pages are read as engines read them, verified, a window at a time. On the daemon's host those on
NVMe are read where they lie, so that none comes into DRAM for this; elsewhere the daemon promotes
them. Pages read from DRAM count as used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.backup.backup_file import BackupWriter
from kvwarehouse.backup.chains import ChainPage, Chains
from kvwarehouse.backup.listing import add_listed
from kvwarehouse.backup.prompt_path import PromptPath
from kvwarehouse.client import Client, OpenNamespace
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.listed import held_prefix, open_listed
from kvwarehouse.client.namespace import UNKNOWN_NAMESPACE
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.gpu.nvme_reader import NvmeReader
from kvwarehouse.rate_limit import RateLimit
from kvwarehouse.types import Loaded, Tier

WINDOW_BYTES: Final = 16 << 20
"""Of pages in memory at a time; one page where that is more."""

_MOST_IN_RUN: Final = 1024
_DAMAGED: Final = ("mismatch", "io_error")
_GONE: Final = ("missing", "stale", "cleared")

_NO_EPOCH: Final = -1

Load: TypeAlias = Callable[..., Loaded]


class _ClearedError(Exception):
    """What is read of the namespace now may be of other weights than what was written."""


@dataclass
class ExportCounts:
    namespaces: int = 0
    planned: int = 0
    """Pages of the namespaces begun with."""
    pages: int = 0
    payload_bytes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Pages by reason: "gone", evicted or cleared since the export came to their namespace;
    "damaged", none of their copies is what was stored; "not_in_dram"; "no_parent": of those that
    are none of these, an ancestor is, or is in no tier."""
    _unplanned: int = 0

    def plan(self, chains: Chains) -> None:
        self.planned += chains.pages
        self.left_out += chains.left_out
        self._unplanned += chains.left_out.total()

    @property
    def missing(self) -> int:
        """Planned, and neither written nor left out yet."""
        return self.planned - self.pages - (self.left_out.total() - self._unplanned)


class Export:
    """tier: "dram" leaves pages out that are on NVMe alone; None takes all."""

    def __init__(
        self, client: Client, *, tier: str | None = None, rate: RateLimit, timeout_s: float
    ) -> None:
        self._client = client
        self._tier = tier
        self._rate = rate
        self._timeout_s = timeout_s
        self._quarantined = self._asked_quarantined()
        self.counts = ExportCounts()

    def run(self, writer: BackupWriter, spaces: list[StoredNamespace]) -> Iterator[ExportCounts]:
        """Yields what was written so far, after each window; the writer's end is the caller's.
        Raises TransportError where the daemon does not answer any more."""
        for space in spaces:
            self.counts.namespaces += 1
            try:
                yield from self._namespace(writer, space)
            except _ClearedError:
                self.counts.left_out["gone"] += self.counts.missing
            except UsageError as error:
                if error.code not in UNKNOWN_NAMESPACE:
                    raise
                # Forgotten since, or of pages that this daemon has no slabs for.
                self.counts.left_out["gone"] += self.counts.missing
        self._client.status()  # pages read from the memory of a daemon that is gone prove nothing

    def _namespace(self, writer: BackupWriter, space: StoredNamespace) -> Iterator[ExportCounts]:
        epoch = self._epoch(space.id)
        chains = Chains(self._tier)
        add_listed(self._client, space, chains, self._timeout_s)
        self.counts.plan(chains)
        with self._loader() as load:
            window_bytes = self._rate.window_bytes(WINDOW_BYTES)
            opened = open_listed(self._client, space)
            reading = _Reading(opened, load, self._wait_s, window_bytes, epoch)
            yield from self._runs(writer, chains, reading)

    def _runs(
        self, writer: BackupWriter, chains: Chains, reading: _Reading
    ) -> Iterator[ExportCounts]:
        runs = chains.runs(reading.most_pages)
        run = next(runs, None)
        while run is not None:
            if len(run) > reading.most_pages - len(reading.window):
                yield from self._write(writer, reading)
            taken, why = self._read(reading, run)
            if taken < len(run):
                self._leave_out(reading, run[taken], why)
            run = _sent(runs, taken)
        yield from self._write(writer, reading)

    def _read(self, reading: _Reading, run: list[ChainPage]) -> tuple[int, str]:
        """As reading.read. The time of a load is for a page: over a slow network it ends with some,
        and the next load goes on. "not_in_dram": where no more was asked for."""
        taken, again = 0, True
        while True:
            more, why = reading.read(run[taken:])
            taken += more
            if taken == len(run) or why != "timeout":
                return taken, why
            if more:
                continue
            # Either the daemon did not wait for NVMe, or the network did not bring a page in time.
            where = reading.tier_of(run[taken]) if self._tier == "dram" else None
            if where == Tier.NVME:
                return taken, "not_in_dram"
            if where != Tier.DRAM or not again:
                return taken, why
            again = False  # it may have come into DRAM since

    def _write(self, writer: BackupWriter, reading: _Reading) -> Iterator[ExportCounts]:
        if not reading.window:
            return
        # Asked once they are read: behind a clear engines store the same prompts anew, maybe with
        # other weights, and what a backup has of one prompt must be of one computation.
        if self._epoch(reading.space_id) != reading.epoch:
            raise _ClearedError
        before_bytes = writer.payload_bytes
        for page, shards in reading.window:
            page.number = writer.page(
                reading.space_id,
                (page.position, reading.numbers[page.position]),
                (page.by_tokens, page.witness),
                [shard.data for shard in shards],
            )
            reading.numbers[page.position + 1 :] = [page.number]
        reading.window.clear()
        self.counts.pages = writer.pages
        self.counts.payload_bytes = writer.payload_bytes
        yield self.counts
        self._rate.spend(writer.payload_bytes - before_bytes)

    def _epoch(self, namespace_id: bytes) -> int:
        """Its clear epoch now; asks the daemon."""
        now = {each.id: each.clear_epoch for each in self._client.namespaces()}
        return now.get(namespace_id, _NO_EPOCH)

    def _leave_out(self, reading: _Reading, page: ChainPage, why: str) -> None:
        if why in _DAMAGED or self._was_quarantined():
            reason = "damaged"
        elif why == "not_in_dram":
            reason = why
        elif why in _GONE or reading.tier_of(page) == Tier.MISSING:
            reason = "gone"  # the remote store may have it, and could not give it now
        else:
            raise TransportError(
                f"the daemon did not give a page within {self._timeout_s:g} s ({why}); look at it"
                " with `kvwarehouse status`, and export again, or with a larger --timeout",
                code="deadline",
            )
        self.counts.left_out[reason] += 1
        if below := page.below() - 1:
            self.counts.left_out["no_parent"] += below

    def _was_quarantined(self) -> bool:
        """Whether the daemon took a page out for its bytes since it was asked last: a damaged
        record is found by reading it, and is missing then."""
        before, self._quarantined = self._quarantined, self._asked_quarantined()
        return self._quarantined > before

    def _asked_quarantined(self) -> int:
        return int(self._client.status()["core"]["quarantined"])

    @property
    def _wait_s(self) -> float:
        return 0.0 if self._tier == "dram" else self._timeout_s

    @contextmanager
    def _loader(self) -> Iterator[Load | None]:
        """None: the namespace's own."""
        if not self._client.local or self._tier == "dram":
            yield None
            return
        with NvmeReader() as reader:
            yield reader.load


class _Reading:
    """The pages of one namespace, read in pre-order."""

    def __init__(
        self,
        opened: OpenNamespace,
        load: Load | None,
        timeout_s: float,
        window_bytes: int,
        epoch: int,
    ) -> None:
        space = opened.space
        self._opened = opened
        self._load = load
        self._timeout_s = timeout_s
        self._path = PromptPath()
        self.space_id = space.id
        self.epoch = epoch
        """The namespace's clear epoch before its pages were listed."""
        self.numbers: list[int | None] = [None]
        """Of the parent of a page at each position on the path."""
        page_bytes = space.shards * space.page_bytes
        self.most_pages = max(1, min(_MOST_IN_RUN, window_bytes // page_bytes))
        self._shards = [
            np.empty((self.most_pages, space.page_bytes), np.uint8) for _ in range(space.shards)
        ]
        self.window: list[tuple[ChainPage, list[NDArray[np.uint8]]]] = []
        """What was read and is not written yet, each with its shards, which lie in memory of the
        reading's own."""

    def read(self, run: list[ChainPage]) -> tuple[int, str]:
        """Adds its pages to the window: how many of them are there, and why the next is not."""
        first, at = run[0].position, len(self.window)
        self._path.cut(first)
        for page in run:
            self._path.add(page.witness, by_tokens=page.by_tokens)
        taken, why = len(run), ""
        for number, shard in enumerate(self._shards):
            if not taken:
                break
            loaded = self._load_shard(first, shard[at : at + taken], number)
            if loaded < taken:
                taken, why = int(loaded), next(iter(loaded.missed), "missing")
        self._path.cut(first + taken)
        for row, page in enumerate(run[:taken], at):
            self.window.append((page, [shard[row] for shard in self._shards]))
        return taken, why

    def tier_of(self, page: ChainPage) -> Tier:
        """Where it is now, whose parent was read last: DRAM, NVMe, or in no tier of the daemon."""
        self._path.cut(page.position)
        above = held_prefix(self._opened, **self._path.prefix())
        self._path.add(page.witness, by_tokens=page.by_tokens)
        held = held_prefix(self._opened, **self._path.prefix())
        self._path.cut(page.position)
        if held.pages <= page.position:
            return Tier.MISSING
        return Tier.NVME if held.nvme_pages > above.nvme_pages else Tier.DRAM

    def _load_shard(self, first: int, out: NDArray[np.uint8], shard: int) -> Loaded:
        wanted: dict[str, Any] = {
            **self._path.prefix(),
            "out": out,
            "shard": shard,
            "timeout_s": self._timeout_s,
            "first": first,
        }
        if self._load is None:
            return self._opened.load(**wanted)
        return self._load(self._opened, **wanted)


def _sent(runs: Any, taken: int) -> list[ChainPage] | None:
    try:
        run: list[ChainPage] = runs.send(taken)
    except StopIteration:
        return None
    return run

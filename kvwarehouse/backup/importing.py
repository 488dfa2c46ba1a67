"""From a backup into a daemon. One owner.

Pages are stored in the file's order, a window at a time, each verified before any of it is stored;
what is stored already is passed over. A page whose parent is not there is not stored either.

A clear beside it is not undone: every store says the namespace's clear epoch of the beginning, and
the daemon drops what is older than a clear. From then on the import takes no more pages of that
namespace.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.backup.backup_file import BackupNamespace, BackupPage, BackupReader
from kvwarehouse.backup.prompt_path import PromptPath
from kvwarehouse.backup.room import MayLeave, Room
from kvwarehouse.backup.target import Target
from kvwarehouse.client import Client, OpenNamespace
from kvwarehouse.client.listed import held_prefix
from kvwarehouse.client.namespace import UNKNOWN_NAMESPACE
from kvwarehouse.errors import CapacityError, StorageError, TransportError, UsageError
from kvwarehouse.rate_limit import RateLimit

WINDOW_BYTES: Final = 16 << 20
"""Of verified pages in memory at a time, and one page more."""

_WINDOW_PAGES: Final = 1024
_WINDOW_SHARE: Final = 8  # of DRAM: what room is looked for at a time must not push itself out
_ARENA_SHARE: Final = 64  # of DRAM is unfinished at a time; a process alone may have an eighth
_TRIES: Final = 8
_LOOKS: Final = 3
_PAUSE_S: Final = 0.1  # before the second try; the daemon refuses a tail again for a second
_FULL: Final = {"no_room", "index_full"}


@dataclass
class ImportCounts:
    pages: int = 0
    """Read and verified."""
    payload_bytes: int = 0
    stored: int = 0
    already: int = 0
    left: int = 0
    """Not stored: there was no room."""
    cleared: int = 0
    """Not stored: the namespace was cleared meanwhile."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Not stored, by the daemon's reason, or "no_parent"."""


class Import:
    """may_leave: what of the target may be evicted for what comes."""

    def __init__(
        self,
        client: Client,
        target: Target,
        *,
        may_leave: MayLeave,
        rate: RateLimit,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._target = target
        self._room = Room(client, may_leave)
        self._insists = may_leave != "none"
        self._rate = rate
        self._timeout_s = timeout_s
        dram_bytes = client.status()["core"]["tiers"]["dram"]["capacity_bytes"]
        self._most_bytes = dram_bytes // _WINDOW_SHARE
        self._unfinished_bytes = dram_bytes // _ARENA_SHARE
        self._path = PromptPath()
        self._space: BackupNamespace | None = None
        self.counts = ImportCounts()
        self.full = False
        """There was no room for a page; from then on none is stored, but all are verified."""

    def run(self, reader: BackupReader) -> Iterator[ImportCounts]:
        """Yields what was done so far, after each window. Raises StorageError where the file is
        not what was written; what was verified before that is stored, and stays."""
        window_bytes = self._rate.window_bytes(min(WINDOW_BYTES, self._most_bytes))
        pages, window, damage = reader.pages(), _Window(window_bytes), None
        while True:
            try:
                page = next(pages, None)
            except StorageError as error:
                page, damage = None, error
            if page is None or not window.takes(page):
                self._take(window)
                yield self.counts
                window = _Window(window_bytes)
            if page is None:
                break
            window.add(page)
            self.counts.pages += 1
            self.counts.payload_bytes += len(page.payload)
        self._room.settle()
        if damage is not None:
            raise damage

    def _take(self, window: _Window) -> None:
        if not window.runs:
            return
        space = window.runs[0][0].namespace
        if space is not self._space:
            self._space, self._path = space, PromptPath()
        if self._is_cleared(window.runs[0][0]):
            self.counts.cleared += window.pages
            return
        stored = self.counts.stored
        if not self.full:
            self._room.look()
        for run in window.runs:
            try:
                self._take_run(run)
            except UsageError as error:
                if error.code not in UNKNOWN_NAMESPACE:
                    raise
                self.counts.cleared += len(run)  # forgotten: it has no page any more
        self._rate.spend((self.counts.stored - stored) * space.page_bytes)

    def _take_run(self, run: list[BackupPage]) -> None:
        """Passes over what is there, and stores the rest as far as there is room for it."""
        opened = self._target.opened(run[0].namespace.id)
        first, space = run[0].position, opened.space
        self._path.cut(first)
        for page in run:
            self._path.add(page.witness, by_tokens=page.by_tokens)
        there = self._held(opened, self._path.prefix(), first)
        if there < 0:
            self._not_stored(run, "no_parent")
            return
        rest = run[there:]
        fit = 0 if self.full else self._room.take(len(rest), space.shards, space.page_bytes)
        self.full = self.full or fit < len(rest)
        stored, why = self._store(opened, rest[:fit])
        self.counts.already += len(run) - len(rest)
        self.counts.stored += stored
        self.full = self.full or why in _FULL
        self._not_stored(rest[stored:], why)

    def _not_stored(self, pages: list[BackupPage], why: str) -> None:
        if not pages:
            return
        if self.full:
            self.counts.left += len(pages)
        elif why == "cleared" or (why == "no_parent" and self._is_cleared(pages[0])):
            self.counts.cleared += len(pages)
        else:
            self.counts.dropped[why] += len(pages)

    def _is_cleared(self, page: BackupPage) -> bool:
        return self._target.is_cleared(page.namespace.id)

    def _store(self, opened: OpenNamespace, pages: list[BackupPage]) -> tuple[int, str]:
        """How many were stored, and why the next was not. All shards of some, then of the next: a
        page is unfinished until its last shard is there, and the daemon bounds those."""
        space = opened.space
        batch = max(1, self._unfinished_bytes // (space.shards * space.page_bytes))
        for at in range(0, len(pages), batch):
            part = pages[at : at + batch]
            stored, why = self._store_batch(opened, part)
            if stored < len(part):
                return at + stored, why
        return len(pages), ""

    def _store_batch(self, opened: OpenNamespace, pages: list[BackupPage]) -> tuple[int, str]:
        """What is refused for now is asked for again, a few times."""
        first, shards = pages[0].position, _shards(opened, pages)
        epoch = self._target.epoch(opened.space.id)
        prefix = self._path.prefix(first + len(pages))
        done, why = 0, ""
        for attempt in range(_TRIES):
            if attempt:
                self._wait(attempt * _PAUSE_S)
            dropped: dict[str, int] = {}
            for number, rows in enumerate(shards):
                stored = opened.store(
                    **prefix,
                    pages=rows[done:],
                    shard=number,
                    first=first + done,
                    timeout_s=self._timeout_s,
                    since_epoch=epoch,
                )
                dropped |= stored.dropped
            done = self._held(opened, prefix, first)
            told = {"cleared"} & dropped.keys() or _FULL & dropped.keys() or dropped
            why = next(iter(told), "later")
            refused = why == "cleared" or (why in _FULL and not self._insists)
            if done == len(pages) or done < 0 or refused:
                break
            _refuse_lost(dropped)
        return max(0, done), "no_parent" if done < 0 else why

    def _held(self, opened: OpenNamespace, prefix: dict[str, Any], first: int) -> int:
        """Pages from `first` on that are there; below 0 where there are none up to it. Looks again
        then: a lookup takes a page for missing in whose entry the daemon is held up."""
        held = -1
        for look in range(_LOOKS):
            if look:
                time.sleep(_PAUSE_S)
            held = held_prefix(opened, **prefix).pages - first
            if held >= 0:
                break
        return held

    def _wait(self, seconds: float) -> None:
        """Of a prompt that is longer than DRAM the last page leaves for the next, and only once
        NVMe has it."""
        if self._insists:
            self._client.flush(self._timeout_s)
        time.sleep(seconds)


class _Window:
    """Verified pages of one namespace, to be stored together: runs, each page of which is the
    parent of the next."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.runs: list[list[BackupPage]] = []
        self.pages = 0
        self._bytes = 0

    def takes(self, page: BackupPage) -> bool:
        if not self.runs:
            return True
        fits = self._bytes + len(page.payload) <= self._most_bytes and self.pages < _WINDOW_PAGES
        return fits and self.runs[0][0].namespace is page.namespace

    def add(self, page: BackupPage) -> None:
        if self.runs and self.runs[-1][-1].number == page.parent:
            self.runs[-1].append(page)
        else:
            self.runs.append([page])
        self.pages += 1
        self._bytes += len(page.payload)


def _shards(opened: OpenNamespace, pages: list[BackupPage]) -> list[NDArray[np.uint8]]:
    """A row for each page, of each shard."""
    shape = (len(pages), opened.space.shards, opened.space.page_bytes)
    whole = np.empty(shape, np.uint8)
    for row, page in zip(whole, pages, strict=True):
        row.reshape(-1)[:] = np.frombuffer(page.payload, np.uint8)
    return [np.ascontiguousarray(whole[:, number]) for number in range(shape[1])]


def _refuse_lost(dropped: dict[str, int]) -> None:
    """Raises what no further try of this import would mend."""
    if "draining" in dropped:
        raise CapacityError(
            "the daemon drains: it takes no stores until `kvwarehouse drain --undo`, or another is"
            " started; run the import again then, it goes on where it ended",
            code="draining",
        )
    if "unreachable" in dropped:
        raise TransportError(
            "the daemon is gone; run the import again once it is back, it goes on where it ended",
            code="unavailable",
        )

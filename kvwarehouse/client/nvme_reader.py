"""Loads that read pages on NVMe where they lie, past the daemon: held, read, verified, handed over.

The daemon's own path stays beneath it and has the last word: what cannot be held (the daemon is of
an older version, the segment is about to be reused, too many are held) or fails on the way (an
error of the device, a page that is not what its record says) is asked for as any load asks for it.
There the daemon reads it again, finds a damaged record by itself and takes it out.

Threads take turns. Invariants: nothing is handed over that was not verified against its record's
digest; a hold ends only when every transfer from it has.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvwarehouse import engine
from kvwarehouse.client.keys import Keys
from kvwarehouse.client.landing import HostLanding, Landing
from kvwarehouse.client.mover import Finished, HeldFile, Mover, PreadMover
from kvwarehouse.client.opened import OpenNamespace
from kvwarehouse.client.prefix import Prefix, Window, checked_timeout
from kvwarehouse.client.regions import Regions
from kvwarehouse.types import Loaded, Tier

_GAP_BYTES = 16 << 10
"""Read along where it joins two pages to one transfer: a record's header is 4 KiB, seldom more."""
_NOT_GOOD = "a page is not what its record says, or was cleared"
_LATE = "pages were not verified within the load's time"
_WORTH_TRYING = ("none", "later")
"""Of a hold that ended early with some pages: the next one may have more."""


class _Read(NamedTuple):
    """See engine.Extents.plan."""

    round: int
    file: int
    offset_bytes: int
    size_bytes: int
    stage_at: int
    first: int
    pages: int


class NvmeReader:
    """Of one namespace at a daemon of this host. Also a context manager; owns its mover.

    opened: what client.open returned. mover, landing: by default preadv into host memory."""

    def __init__(
        self, opened: OpenNamespace, mover: Mover | None = None, landing: Landing | None = None
    ) -> None:
        self.opened = opened
        self.mover = mover or PreadMover()
        self.pages_read = 0
        """Past the daemon, since it was made."""
        self.failures: dict[str, int] = {}
        """What ended reads past the daemon, by its text; the pages went the daemon's way."""
        self._landing = landing or HostLanding()
        self._turn = threading.Lock()

    def load(
        self,
        tokens: Any = None,
        out: Any = None,
        shard: int = 0,
        timeout_s: float = 5.0,
        *,
        keys: Keys | None = None,
        first: int = 0,
    ) -> Loaded:
        """As OpenNamespace.load, with the same arguments, promises and errors: each page by the
        tier that it is in now. Between transfers it keeps to timeout_s; a device that does not
        answer holds the calling thread for as long, since it may still write to the stage."""
        moves = self.opened._moves
        prefix, wanted, regions = moves.loading(tokens, keys, out, (first, shard))
        deadline_s = time.monotonic() + checked_timeout(timeout_s)
        if not wanted.pages:
            return Loaded(0)
        if not self._turn.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            return Loaded(0, {"timeout": wanted.pages})
        try:
            return _Load(self, prefix, wanted, regions, deadline_s).run()
        finally:
            self._turn.release()

    def close(self) -> None:
        with self._turn:
            self.mover.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Load:
    """One load in progress."""

    def __init__(
        self,
        reader: NvmeReader,
        prefix: Prefix,
        wanted: Window,
        out: Regions,
        deadline_s: float,
    ) -> None:
        self._reader = reader
        self._landing = reader._landing
        self._moves = reader.opened._moves
        self._prefix, self._wanted, self._out = prefix, wanted, out
        self._deadline_s = deadline_s
        self._under_way: deque[tuple[_Read, Finished]] = deque()

    def run(self) -> Loaded:
        at, direct = 0, True
        tiers = self._moves.tiers_of(self._prefix)[self._wanted.first :]
        while at < self._wanted.pages:
            pages = self._span(tiers, at)
            if direct and tiers[at] == Tier.NVME:
                read, direct = self._past_daemon(at, pages)
                at += read
                continue
            filled, why = self._by_daemon(at, pages)
            at += filled
            direct = True
            if filled < pages:
                return Loaded(at, {why: self._wanted.pages - at})
        return Loaded(at)

    def _span(self, tiers: Any, at: int) -> int:
        """Pages from `at` on that are in one tier."""
        end = at + 1
        while end < self._wanted.pages and tiers[end] == tiers[at]:
            end += 1
        return end - at

    def _by_daemon(self, at: int, pages: int) -> tuple[int, str]:
        filled, missed = self._moves.load_window(
            self._prefix, self._window(at, pages), self._out.part(at, pages), self._left_s()
        )
        return filled, next(iter(missed), "missing")

    def _past_daemon(self, at: int, pages: int) -> tuple[int, bool]:
        """Pages that are in `out` now, and whether the next may be tried in this way too."""
        extents = self._moves.hold(self._prefix, self._window(at, pages), self._left_s())
        try:
            held, ended = extents.pages, extents.ended
            read = self._through(extents, self._out.part(at, pages)) if held else 0
        finally:
            self._arrived()  # what is still under way, however this ended
            extents.release()
        self._reader.pages_read += read
        return read, 0 < read == held and ended in _WORTH_TRYING

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _window(self, at: int, pages: int) -> Window:
        return Window(self._wanted.first + at, pages, self._wanted.shard)

    def _through(self, extents: engine.Extents, out: Regions) -> int:
        """Pages delivered, in order. One round of transfers is under way while the one before is
        verified."""
        files = [HeldFile(*each) for each in extents.files()]
        rounds = _rounds(extents, self._landing.stage_bytes)
        delivered = turn = 0
        self._start(files, next(rounds), turn)
        while self._under_way:
            asked = sum(read.pages for read, _ in self._under_way)
            arrived = self._arrived()
            if arrived == asked and self._left_s() > 0:
                self._start(files, next(rounds, []), 1 - turn)
            done = self._landing.deliver(turn, extents, delivered, arrived, out, self._left_s())
            delivered += done
            if done < arrived:
                in_time = self._left_s() > 0
                self._failed(_NOT_GOOD if in_time else _LATE)
                break
            turn = 1 - turn
        return delivered

    def _start(self, files: list[HeldFile], reads: list[_Read], turn: int) -> None:
        for read in reads:
            target = self._landing.part(turn, read.stage_at, read.size_bytes)
            try:
                end = self._reader.mover.start(files[read.file], read.offset_bytes, target)
            except (OSError, RuntimeError) as error:
                end = _raising(error)
            self._under_way.append((read, end))

    def _arrived(self) -> int:
        """Waits for all transfers. Pages before the first that failed."""
        pages, good = 0, True
        while self._under_way:
            read, finished = self._under_way.popleft()
            try:
                finished()
            except (OSError, RuntimeError) as error:
                good = False
                self._failed(str(error))
            pages += read.pages if good else 0
        return pages

    def _failed(self, why: str) -> None:
        failures = self._reader.failures
        if why in failures or len(failures) < 16:
            failures[why] = failures.get(why, 0) + 1


def _rounds(extents: engine.Extents, stage_bytes: int) -> Iterator[list[_Read]]:
    plan = (_Read(*each) for each in extents.plan(stage_bytes, _GAP_BYTES))
    for _, reads in groupby(plan, key=lambda read: read.round):
        yield list(reads)


def _raising(error: OSError | RuntimeError) -> Finished:
    def finished() -> None:
        raise error

    return finished

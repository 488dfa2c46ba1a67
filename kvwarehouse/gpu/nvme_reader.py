"""Loads that read pages on NVMe where they lie, past the daemon: held, read, verified, handed over.

The daemon's own path stays beneath it and has the last word: what cannot be held (the daemon is of
an older version, the segment is about to be reused, too many are held) or fails on the way (an
error of the device, a page that is not what its record says) is asked for as any load asks for it.
There the daemon reads it again, finds a damaged record by itself and takes it out.

One load at a time reads past the daemon; those beside it go the daemon's way, so that none waits
for another. Invariants: nothing is handed over that was not verified against its record's digest; a
hold ends only when every transfer from it has; no load has pages from before a clear and from after
it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.namespace import OpenNamespace, tiers_of
from kvwarehouse.client.prompt import Keys
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.requests import LoadRequest, TiersRequest
from kvwarehouse.client.transport import shared_memory_of
from kvwarehouse.gpu.file_reader import FileReader, Finished, HeldFile, PreadReader
from kvwarehouse.gpu.staging_area import HostStagingArea, StagingArea
from kvwarehouse.types import Loaded, Tier

if TYPE_CHECKING:
    from kvwarehouse import core
    from kvwarehouse.client.shared_memory import SharedMemory

_CLOSE_S = 5.0
_GAP_BYTES = 16 << 10
"""Read along where it joins two pages to one transfer: a record's header is 4 KiB, seldom more."""
_NOT_GOOD = "a page is not what its record says, or was cleared"
_LATE = "pages were not verified within the load's time"
_BLOCK = 4096
_WORTH_TRYING = ("none", "later")
"""Of a hold that ended early with some pages: the next one may have more."""
_RECENT_PLACES = 1 << 16

# Loads whose transfers nobody waits for; never taken out.
_kept: list[_Load] = []


class _Read(NamedTuple):
    """See core.Extents.plan."""

    round: int
    file: int
    offset_bytes: int
    size_bytes: int
    stage_at: int
    first: int
    pages: int


class NvmeReader:
    """For namespaces at a daemon of this host. Also a context manager; owns its file reader.

    file_reader, staging: by default preadv into host memory.
    promotes: what this reader has read before goes the daemon's way, so that pages that are used
    again come into DRAM."""

    def __init__(
        self,
        file_reader: FileReader | None = None,
        staging: StagingArea | None = None,
        *,
        promotes: bool = False,
    ) -> None:
        self.file_reader = file_reader or PreadReader()
        self.pages_read = 0
        """Past the daemon, since it was made."""
        self.failures: dict[str, int] = {}
        """What ended reads past the daemon, by its text; the pages went the daemon's way."""
        self.failures_in_a_row = 0
        """Loads for which nothing could be read past the daemon, and not for want of time, since
        something was."""
        self._staging = staging or HostStagingArea()
        self._recent = RecentPages() if promotes else None
        self._turn = threading.Lock()

    def load(  # noqa: PLR0913  those of opened.load
        self,
        opened: OpenNamespace,
        tokens: Any = None,
        out: Any = None,
        shard: int = 0,
        timeout_s: float = 5.0,
        *,
        keys: Keys | None = None,
        first: int = 0,
    ) -> Loaded:
        """As opened.load, with the same arguments, promises and errors: each page by the tier that
        it is in now. opened: what client.open returned. A device that does not answer in time holds
        nobody: its pages are a timeout, and until it answers loads go the daemon's way."""
        wanted = LoadRequest.checked(opened.space, tokens, keys, out, first, shard, timeout_s)
        deadline_s = time.monotonic() + wanted.timeout_s
        pages = wanted.out.count
        if not pages:
            return Loaded(0)
        part = slice(wanted.first, wanted.first + pages)
        memory = shared_memory_of(opened)
        since = memory.clear_epoch(wanted.space)
        asked = TiersRequest(wanted.space, wanted.prefix, counted=False)
        direct = tiers_of(opened, asked)[part] == Tier.NVME
        tags = None
        if self._recent is not None and direct.any():
            tags = memory.tags(wanted)[part]
            direct &= ~self._recent.among(tags)
        here = since is not None and direct.any() and self._fits(wanted.out)
        if not (here and self._turn.acquire(blocking=False)):
            left_s = max(0.0, deadline_s - time.monotonic())
            return memory.load(wanted._replace(timeout_s=left_s))
        load = _Load(self, memory, wanted, since, deadline_s)
        try:
            loaded = load.run(direct)
            if self._recent is not None and tags is not None:
                self._recent.add(tags[: int(loaded)][direct[: int(loaded)]])
            return loaded
        finally:
            load.end(self._turn.release)

    def _fits(self, regions: Regions) -> bool:
        return -(-regions.page_bytes // _BLOCK) * _BLOCK <= self._staging.stage_bytes

    def close(self) -> None:
        """The file reader is closed behind the last load; it is left to the process's end where
        that does not end in 5 s."""
        if self._turn.acquire(timeout=_CLOSE_S):
            try:
                self.file_reader.close()
            finally:
                self._turn.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RecentPages:
    """Which pages were seen before, as far as a table of a fixed size tells: 512 KiB for 65,536
    pages. A page's tag has one place in it, and the page that comes last has the place: one that
    was pushed out is new again. Not thread-safe."""

    def __init__(self, places: int = _RECENT_PLACES) -> None:
        """places: a power of two."""
        self._tags = np.zeros(places, np.uint64)
        self._mask = np.uint64(places - 1)

    def among(self, tags: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these are known. tags: SharedMemory.tags."""
        found: NDArray[np.bool_] = self._tags[tags & self._mask] == tags
        return found

    def add(self, tags: NDArray[np.uint64]) -> None:
        self._tags[tags & self._mask] = tags


class _Load:
    """One load in progress, to be ended by `end`."""

    def __init__(
        self,
        reader: NvmeReader,
        memory: SharedMemory,
        wanted: LoadRequest,
        since: int | None,
        deadline_s: float,
    ) -> None:
        self._reader = reader
        self._staging = reader._staging
        self._memory = memory
        self._wanted = wanted
        self._since = since
        self._deadline_s = deadline_s
        self._under_way: deque[tuple[_Read, Finished]] = deque()
        self._held: core.Extents | None = None
        self._read = 0
        self._bad = False

    def run(self, direct: NDArray[np.bool_]) -> Loaded:
        """direct: which of the pages that are wanted are to be read past the daemon. Each of the
        native client's calls has the clear epoch of its own beginning, so that the next one would
        go on with what was stored after a clear."""
        at, pages = 0, self._wanted.out.count
        while at < pages:
            read, others = 0, _span(direct, at)
            if direct[at] and self._held is None:
                read, others = self._past_daemon(at, others)
            filled, why = self._by_daemon(at + read, others) if others else (0, "")
            if self._cleared():
                return Loaded(at, {"cleared": pages - at})
            at += read + filled
            if filled < others:
                return Loaded(at, {why: pages - at})
        return Loaded(at)

    def _cleared(self) -> bool:
        return self._memory.clear_epoch(self._wanted.space) != self._since

    def end(self, then: Callable[[], None]) -> None:
        """Calls `then` when nothing writes to the stages any more: now, or from a thread that waits
        for a device which has not answered in time."""
        self._reader.pages_read += self._read
        if self._read:
            self._reader.failures_in_a_row = 0
        elif self._bad:
            self._reader.failures_in_a_row += 1
        if self._held is None:
            then()
            return

        def wait() -> None:
            while not self._arrived(inf).all_ended:
                pass
            self._let_go()
            then()

        try:
            threading.Thread(target=wait, name="kvw-late", daemon=True).start()
        except RuntimeError:  # no more threads: nobody waits, so the stages are nobody's any more
            _kept.append(self)

    def _by_daemon(self, at: int, pages: int) -> tuple[int, str]:
        loaded = self._memory.load(self._wanted.part(at, pages, self._left_s()))
        return int(loaded), next(iter(loaded.missed), "missing")

    def _past_daemon(self, at: int, pages: int) -> tuple[int, int]:
        """Pages that are in `out` now, and how many behind them are the daemon's to bring; the next
        may be tried here where that is none."""
        held = self._held = self._memory.hold(self._wanted.part(at, pages, self._left_s()))
        try:
            here, ended = held.pages, held.ended
            read = self._through(held, self._wanted.out.part(at, here)) if here else 0
        finally:
            if self._arrived(self._left_s()).all_ended:  # what is under way, however this ended
                self._let_go()
        self._read += read
        more = 0 < read == here and ended in _WORTH_TRYING
        return read, 0 if more else pages - read

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _through(self, extents: core.Extents, out: Regions) -> int:
        """Pages delivered, in order. One round of transfers is under way while the one before is
        verified."""
        files = [HeldFile(*each) for each in extents.files()]
        rounds = _rounds(extents, self._staging.stage_bytes)
        delivered = turn = 0
        self._start(files, next(rounds), turn)
        while self._under_way:
            arrived = self._arrived(self._left_s())
            if arrived.all_good and self._left_s() > 0:
                self._start(files, next(rounds, []), 1 - turn)
            done = self._staging.deliver(
                turn, extents, delivered, arrived.pages, out, self._left_s()
            )
            delivered += done
            if done < arrived.pages or not arrived.all_ended:
                self._ended(_NOT_GOOD if self._left_s() > 0 else _LATE)
                break
            turn = 1 - turn
        return delivered

    def _start(self, files: list[HeldFile], reads: list[_Read], turn: int) -> None:
        for read in reads:
            target = self._staging.part(turn, read.stage_at, read.size_bytes)
            try:
                end = self._reader.file_reader.start(files[read.file], read.offset_bytes, target)
            except Exception as error:  # noqa: BLE001 - whatever a reader raises, none was begun
                end = _raising(error)
            self._under_way.append((read, end))

    def _arrived(self, timeout_s: float) -> _Arrived:
        """Waits for all transfers."""
        until_s = time.monotonic() + timeout_s
        pages, good = 0, True
        while self._under_way:
            read, finished = self._under_way[0]
            try:
                if not finished(max(0.0, until_s - time.monotonic())):
                    return _Arrived(pages, all_good=False, all_ended=False)
            except Exception as error:  # noqa: BLE001 - whatever a reader raises, it has ended
                good = False
                self._ended(str(error) or type(error).__name__)
            self._under_way.popleft()
            pages += read.pages if good else 0
        return _Arrived(pages, all_good=good, all_ended=True)

    def _ended(self, why: str) -> None:
        """A read, by something else than its end."""
        self._bad |= why != _LATE
        failures = self._reader.failures
        if why in failures or len(failures) < 16:
            failures[why] = failures.get(why, 0) + 1


class _Arrived(NamedTuple):
    """pages: before the first that failed, or whose transfer has not ended."""

    pages: int
    all_good: bool
    all_ended: bool


def _span(direct: NDArray[np.bool_], at: int) -> int:
    """Pages from `at` on that go one way."""
    others = (direct[at:] != direct[at]).argmax()
    return int(others) or len(direct) - at


def _rounds(extents: core.Extents, stage_bytes: int) -> Iterator[list[_Read]]:
    plan = (_Read(*each) for each in extents.plan(stage_bytes, _GAP_BYTES))
    for _, reads in groupby(plan, key=lambda read: read.round):
        yield list(reads)


def _raising(error: Exception) -> Finished:
    def finished(timeout_s: float) -> bool:
        raise error

    return finished

"""The remote tier's worker over doubles of what is the core's: it offers the runs that a test
names, and packs bytes.

    python worker_program.py RUNS

RUNS: words. `run` is offered once; `get`: one is wanted back, once it was put and gets are served,
and behind the last of them the link ends; `closed`: the link ends; `bug`: packing fails as nobody
expects; `prints`: packing prints, as a library may; `hangs`: its put never ends, and a minute is
short. Behind the last nothing is offered.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from kvwarehouse import core
from kvwarehouse.errors import TransportError
from kvwarehouse.remote import nodes, store_member, worker
from kvwarehouse.remote.object_store import ObjectStore
from testkit.timed_store import KeptPages

OBJECT = b"an object of pages"


@dataclass(frozen=True)
class Run:
    word: str
    key: bytes
    namespace_id: bytes = b"s" * 16
    epoch: int = 0
    day: int | None = None
    bytes: int = len(OBJECT)


class Packed(bytes):
    reason = ""


@dataclass(frozen=True)
class RunToGet:
    key: bytes
    day: int
    namespace_id: bytes = b"s" * 16
    epoch: int = 0
    begin: int = 0
    end: int = len(OBJECT)
    within_s: float = 60.0


@dataclass(frozen=True)
class Filled:
    end: str = "filled"
    pages: int = 4
    fault: str = ""


class Link:
    def __init__(self, fd: int) -> None:
        self._runs = [item for item in enumerate(sys.argv[1:]) if item[1] != "get"]
        self._lock = threading.Lock()
        self._never = threading.Event()

    def ready(self, puts: int) -> None:
        print(f"ready for {puts}")

    def next(self, timeout_s: float) -> Run | None:
        with self._lock:
            number, word = self._runs.pop(0) if self._runs else (0, "")
        if word == "closed":
            raise TransportError("the daemon closed it", code="link_closed")
        if not word:
            self._never.wait(timeout_s)
            return None
        return Run(word, number.to_bytes(16, "little"))

    def done(self, run: Run) -> None:
        print(f"{run.word} done at nice {os.getpriority(os.PRIO_PROCESS, 0)}")


class GetLink:
    """Wants each run back that was put."""

    def __init__(self, fd: int) -> None:
        self._wanted = self._left = sys.argv.count("get")
        self._ended = 0
        self._serving = False
        self._lock = threading.Lock()

    def ready(self, gets: int) -> None:
        print(f"ready for {gets} gets")

    def state(self, until_ns: int, read_bytes_per_s: int, first_byte_ns: int) -> None:
        assert read_bytes_per_s >= 0
        assert first_byte_ns >= 0
        self._serving = until_ns > 0

    def next(self, timeout_s: float) -> RunToGet | None:
        with self._lock:
            if self._wanted and self._ended == self._wanted:
                raise TransportError("the daemon closed it", code="link_closed")
            if self._left and self._serving and File.made is not None and File.made.days:
                self._left -= 1
                (key, _), day = next(iter(File.made.days.items()))
                return RunToGet(key, day)
        threading.Event().wait(min(timeout_s, 0.05))
        return None

    def done(self, run: RunToGet, end: str, pages: int) -> None:
        print(f"{pages} pages {end} at nice {os.getpriority(os.PRIO_PROCESS, 0)}")
        with self._lock:
            self._ended += 1


class Session:
    def __init__(self, *unused: Any) -> None:
        """Of no daemon."""

    def pack_run(self, run: Run, fleet: bytes) -> Packed:
        if run.word == "bug":
            raise ZeroDivisionError("at https://store/b?sig=planted")
        if run.word == "prints":
            os.write(1, b"a library says something\n")
        return Packed(OBJECT)

    def fill_run(self, run: RunToGet, body: memoryview, fleet: bytes, within_s: float) -> Filled:
        assert bytes(body) == OBJECT
        return Filled()


class File(KeptPages):
    made: File | None = None

    def __init__(self, path: str, fleet: bytes, objects: int, days: int, today: int) -> None:
        super().__init__(days, today)
        File.made = self


def hanging(store: ObjectStore, name: str, data: Any, *, if_absent: bool = False) -> bool:
    """Of pages; other objects are put, and wait as long as a busy machine has them wait."""
    if bytes(data) != OBJECT:
        return put(store, name, data, if_absent=if_absent)
    store_member.__dict__["HUNG_S"] = 0.5
    with store._call("put", 0.1):
        threading.Event().wait()
    raise AssertionError("that never ends")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it ends by os._exit
    core.RemoteLink, core.RemoteGetLink = Link, GetLink  # type: ignore[assignment]
    core.NativeClient, core.PresenceFile = Session, File  # type: ignore[assignment]
    nodes.__dict__["BEAT_S"] = 0.05  # a minute is long for a test
    if "hangs" in sys.argv:
        put = ObjectStore.put
        ObjectStore.put = hanging  # type: ignore[assignment, method-assign]
    worker.main()

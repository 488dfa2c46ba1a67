"""The remote tier's worker over doubles of what is the core's: it offers the runs that a test
names, and packs bytes.

    python worker_program.py RUNS

RUNS: words. `run` is offered once; `closed`: the link ends; `bug`: packing fails as nobody expects;
`prints`: packing prints, as a library may; `hangs`: its put never ends, and a minute is short.
Behind the last nothing is offered.
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


class Link:
    def __init__(self, fd: int) -> None:
        self._runs = list(enumerate(sys.argv[1:]))
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


class Session:
    def __init__(self, *unused: Any) -> None:
        """Of no daemon."""

    def pack_run(self, run: Run, fleet: bytes) -> Packed:
        if run.word == "bug":
            raise ZeroDivisionError("at https://store/b?sig=planted")
        if run.word == "prints":
            os.write(1, b"a library says something\n")
        return Packed(OBJECT)


class File(KeptPages):
    def __init__(self, path: str, fleet: bytes, objects: int, days: int, today: int) -> None:
        super().__init__()
        self.advance(today)

    def day_of(self, key: bytes, epoch: int) -> int | None:
        return self.days.get((key, epoch))


def hanging(store: ObjectStore, name: str, data: Any, *, if_absent: bool = False) -> bool:
    """Of pages; other objects are put."""
    if bytes(data) != OBJECT:
        return put(store, name, data, if_absent=if_absent)
    with store._call("put", 0.1):
        threading.Event().wait()
    raise AssertionError("that never ends")


if __name__ == "__main__":
    for name, double in {"RemoteLink": Link, "NativeClient": Session, "PresenceFile": File}.items():
        setattr(core, name, double)
    nodes.__dict__["BEAT_S"] = 0.05  # a minute is long for a test
    if "hangs" in sys.argv:
        store_member.__dict__["HUNG_S"] = 0.5
        put = ObjectStore.put
        ObjectStore.put = hanging  # type: ignore[assignment, method-assign]
    worker.main()

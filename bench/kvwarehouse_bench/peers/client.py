"""A store's client, in a process of its own. Run as

    python -P -m kvwarehouse_bench.peers.client DESCRIPTOR SETTINGS

and asked by lines of JSON (harness/process.py). Times are taken here, around the store alone; every
page that a load brought is looked at before its time counts. It also changes one byte of a stored
page on the disk, behind its owner's back.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvwarehouse_bench.harness.process import serve
from kvwarehouse_bench.peers.store import (
    CannotRunError,
    StampedPages,
    Store,
    StoreRoom,
    WrongBytesError,
)

_SOUGHT_BYTES = 64

PROMPTS = 8
_ALONE = 64
_FLIPPED, _KEPT = 4, 4


def corrupt_one_byte(folder: Path, page: Any) -> None:
    """Changes a byte in the middle of `page` (uint8, flat) in every file below folder that has it.
    Raises CannotRunError where none has: then the store keeps pages in another form."""
    at = len(page) // 2
    sought = page[at : at + _SOUGHT_BYTES].tobytes()
    changed = sum(_flip_in(path, sought) for path in sorted(folder.rglob("*")) if path.is_file())
    if not changed:
        raise CannotRunError("the bytes of a page are in none of its files as they were given")


def _flip_in(path: Path, sought: bytes) -> int:
    if path.stat().st_size < len(sought):
        return 0
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            at = mapped.find(sought)
        if at < 0:
            return 0
        file.seek(at)
        file.write(bytes([sought[0] ^ 0xFF]))
        file.flush()
        os.fsync(file.fileno())
        return 1


class StoreClient:
    def __init__(self, settings: dict[str, Any]) -> None:
        room = StoreRoom(
            folder=Path(settings["folder"]),
            moved_bytes=settings["moved_bytes"],
            disk=settings["disk"],
            options=settings["options"],
        )
        module, _, name = settings["store"].partition(".")
        self._disk = room.disk
        self._folder = room.folder
        stores = import_module(f"kvwarehouse_bench.peers.stores.{module}")
        self._store: Store = getattr(stores, name)(room)
        self._round = 0
        self._names: Any = None
        self._pages: Any = None
        self._keys = 0
        self._prompts: list[Any] = []

    def do_about(self) -> dict[str, Any]:
        return {**self._store.about(), "ways": list(self._store.ways)}

    def do_close(self) -> None:
        self._store.close()

    def do_pages(self, page_bytes: int) -> int:
        """Pages of this size from now on; how many are moved in a round. Those of another size
        go, those of the same stay."""
        if self._pages is None or self._pages.page_bytes != page_bytes:
            self._store.use(self._store.ways[0])
            self._store.clear()
            self._pages = self._store.memory(page_bytes)
        return int(self._pages.count)

    # --- moved in rounds ---

    def do_store(self, way: str) -> float:
        """Seconds for pages that were never stored."""
        self._new_round(way)
        begin = time.perf_counter()
        self._store.store(self._names, self._pages)
        if self._disk:
            self._store.settle()
        seconds = time.perf_counter() - begin
        self._check_found(self._names, self._pages.count)
        return seconds

    def do_load(self, way: str) -> float:
        """Seconds for what the last round stored."""
        self._store.use(way)
        if self._disk:
            self._store.drop_caches()
        self._pages.wipe()
        self._store.ready(self._names)
        begin = time.perf_counter()
        filled = self._store.load(self._names, self._pages)
        seconds = time.perf_counter() - begin
        self._check_filled(filled)
        return seconds

    def do_compare(self) -> None:
        """Every byte that the last load brought."""
        self._pages.check_whole()

    def do_store_one(self, way: str) -> list[float]:
        """Seconds of each of some pages stored alone."""
        self._new_round(way)
        count = min(self._pages.count, _ALONE)
        names = [self._store.names(f"one/{self._round}/{at}", 1) for at in range(count)]
        parts = [self._pages.part(at, 1) for at in range(count)]
        clock, store = time.perf_counter, self._store.store
        times = []
        for name, part in zip(names, parts, strict=True):
            begin = clock()
            store(name, part)
            times.append(clock() - begin)
        for name in names:
            self._check_found(name, 1)
        return times

    # --- looked up ---

    def do_prompts(self, keys: int) -> None:
        """Stores what is to be looked up: prompts of so many pages each."""
        self._store.clear()
        self._keys = keys
        self._prompts = [self._store.names(f"prompt/{at}", keys) for at in range(PROMPTS)]
        for prompt in self._prompts:
            self._store.store(prompt, self._pages.part(0, keys))
            self._store.ready(prompt)

    def do_lookup(self, calls: int) -> list[float]:
        """Seconds of each call; prompts in turns, so that none is asked for twice in a row."""
        clock, found = time.perf_counter, self._store.found
        times, answers = [], []
        for call in range(calls):
            prompt = self._prompts[call % PROMPTS]
            begin = clock()
            answer = found(prompt)
            times.append(clock() - begin)
            answers.append(answer)
        if set(answers) != {self._keys}:
            raise WrongBytesError(f"of {self._keys} pages that are stored, {set(answers)} found")
        return times

    # --- damaged ---

    def do_flip(self) -> dict[str, int]:
        """What loads of pages answer after one byte in the middle of each was changed on the disk,
        and what those of their neighbours do."""
        self._new_round(self._store.ways[0])
        parts = [self._pages.part(at, 1) for at in range(_FLIPPED + _KEPT)]
        names = [self._store.names(f"flip/{self._round}/{at}", 1) for at in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            self._store.store(name, part)
        self._store.settle()
        self._store.drop_caches()
        for part in parts[:_FLIPPED]:
            corrupt_one_byte(self._folder, part.source[0])
        self._store.drop_caches()
        answers = [self._answer(name, part) for name, part in zip(names, parts, strict=True)]
        return {
            **{
                kind: answers[:_FLIPPED].count(kind) for kind in ("wrong", "miss", "error", "right")
            },
            "flipped": _FLIPPED,
            "others_right": answers[_FLIPPED:].count("right"),
            "others": _KEPT,
        }

    def _answer(self, name: Any, part: StampedPages) -> str:
        part.wipe()
        try:
            if self._store.load(name, part) != 1:
                return "miss"
            part.check_whole()
        except WrongBytesError:
            return "wrong"
        except Exception as error:  # noqa: BLE001 - an error is an answer; it is in the log
            print(f"load of a damaged page: {error!r}", file=sys.stderr)
            return "error"
        return "right"

    def _new_round(self, way: str) -> None:
        self._store.use(way)
        self._store.clear()
        self._round += 1
        self._pages.stamp(self._round)
        self._names = self._store.names(f"round/{self._round}", self._pages.count)

    def _check_found(self, names: Any, count: int) -> None:
        self._store.ready(names)
        found = self._store.found(names)
        if found != count:
            raise WrongBytesError(f"{count} pages were stored, {found} are found")

    def _check_filled(self, filled: int) -> None:
        if filled != self._pages.count:
            raise WrongBytesError(f"{self._pages.count} pages were stored, {filled} were loaded")
        self._pages.check(self._round)


def main(arguments: Sequence[str]) -> None:
    serve(socket.socket(fileno=int(arguments[0])), lambda: StoreClient(json.loads(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])

"""What a process does to the files of one folder, call by call (recorded by strace), and what a
loss of power after any of these calls may leave.

The medium is that of docs/format.md: what was synced is there; an unsynced write is there, or not,
or in part; renames, links and removals become durable in order, at the latest when their folder is
synced. Not thread-safe.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_CALLS: Final = (
    "openat,close,write,writev,pwrite64,pwritev,lseek,ftruncate,fsync,fdatasync,rename,unlink"
)
_SECTOR: Final = 512
_LINE: Final = re.compile(r"^(\w+)\((.*)\)\s+= (-?\d+)")
_TEXT: Final = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def trace(command: list[str], log: Path) -> list[str]:
    """Runs `command` (its children are not traced). FileNotFoundError without strace."""
    strace = ["strace", "-xx", "-s", "4000000", "-e", f"trace={_CALLS}", "-o", str(log)]
    subprocess.run([*strace, *command], check=True)
    return log.read_text().splitlines()


@dataclass
class _File:
    """One inode. `writes` are those that no sync has covered yet."""

    data: bytearray = field(default_factory=bytearray)
    writes: list[tuple[int, bytes]] = field(default_factory=list)

    def sync(self) -> None:
        for at, data in self.writes:
            _put(self.data, at, data)
        self.writes.clear()

    def left(self, how: str, rng: random.Random) -> bytes:
        data = bytearray(self.data)
        for at, written in self.writes:
            if how == "all":
                _put(data, at, written)
            elif how == "torn":
                for part in range(0, len(written), _SECTOR):
                    if rng.random() < 0.5:
                        _put(data, at + part, written[part : part + _SECTOR])
        return bytes(data)


def _put(data: bytearray, at: int, written: bytes) -> None:
    data.extend(bytes(max(0, at + len(written) - len(data))))
    data[at : at + len(written)] = written


@dataclass
class _Open:
    file: _File | None  # None: a folder
    is_synced: bool  # O_DSYNC: every write is
    position: int = 0


class Journal:
    """Steps through a trace. After each step, `left` says what a crash would leave of `folder`."""

    def __init__(self, folder: Path, marks: Path) -> None:
        """`marks`: a file to which the process writes lines as it goes on: see `marked`."""
        self._folder, self._marks = str(folder), str(marks)
        self._names: dict[str, _File] = {}
        self._durable: dict[str, _File] = {}
        self._moves: list[dict[str, _File]] = []  # what the folder became, not synced yet
        self._open: dict[int, _Open] = {}
        self._mark_fds: set[int] = set()
        self.marked: list[str] = []

    def step(self, line: str) -> bool:
        """Whether it changed anything of the folder's."""
        match = _LINE.match(line)
        if match is None or int(match[3]) < 0:
            return False
        call, arguments, result = match[1], match[2], int(match[3])
        texts = [_decoded(text) for text in _TEXT.findall(arguments)]
        if call == "openat":
            return self._openat(texts[0].decode(), arguments, result)
        if call in ("rename", "unlink"):
            return self._move(call, [text.decode() for text in texts])
        descriptor = int(arguments.split(",")[0])
        if call == "close":
            self._open.pop(descriptor, None)
            self._mark_fds.discard(descriptor)
            return False
        return self._on_descriptor(call, descriptor, arguments, b"".join(texts), result)

    def left(self, how: str, rng: random.Random) -> dict[str, bytes]:
        """Files by name. `how`: "none" of what was not synced, "all" of it, or "torn"."""
        names = self._durable
        if self._moves and how != "none":
            last = len(self._moves) - 1
            names = self._moves[last if how == "all" else rng.randrange(last + 1)]
        return {name: file.left(how, rng) for name, file in names.items()}

    def _name(self, path: str) -> str | None:
        folder, name = os.path.split(path)
        return name if folder == self._folder else None

    def _openat(self, path: str, flags: str, descriptor: int) -> bool:
        if path == self._marks:
            self._mark_fds.add(descriptor)
        elif path == self._folder:
            self._open[descriptor] = _Open(None, False)
        elif (name := self._name(path)) is not None and (name in self._names or "O_CREAT" in flags):
            created = name not in self._names
            if created:
                self._names[name] = _File()
                self._moves.append(dict(self._names))
            self._open[descriptor] = _Open(self._names[name], "SYNC" in flags)
            return created
        return False

    def _move(self, call: str, paths: list[str]) -> bool:
        name = self._name(paths[0])
        if name is None or name not in self._names:
            return False
        file = self._names.pop(name)
        if call == "rename":
            target = self._name(paths[1])
            assert target is not None, paths
            self._names[target] = file
        self._moves.append(dict(self._names))
        return True

    def _on_descriptor(
        self, call: str, descriptor: int, arguments: str, data: bytes, result: int
    ) -> bool:
        if descriptor in self._mark_fds and call == "write":
            self.marked += data.decode().splitlines()
        opened = self._open.get(descriptor)
        if opened is None:
            return False
        if call == "lseek":
            opened.position = result
            return False
        if call in ("fsync", "fdatasync"):
            self._sync(opened)
            return True
        assert opened.file is not None, arguments
        if call == "ftruncate":
            size = int(arguments.split(",")[1])
            assert size >= len(opened.file.data), "files are only made longer"
            opened.file.writes.append((size, b""))
            return True
        at = int(arguments.rsplit(",", 1)[1]) if call.startswith("pwrite") else opened.position
        opened.file.writes.append((at, data[:result]))
        if not call.startswith("pwrite"):
            opened.position += result
        if opened.is_synced:
            opened.file.sync()
        return True

    def _sync(self, opened: _Open) -> None:
        if opened.file is not None:
            opened.file.sync()
            # The journal of a filesystem takes the name of a new file with it.
            return
        self._durable = dict(self._names)
        self._moves.clear()


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))

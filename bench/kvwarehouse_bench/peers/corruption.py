"""One byte of a stored page changed on the disk, behind its owner's back. Stateless."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from kvwarehouse_bench.peers.store import CannotRunError

_SOUGHT_BYTES = 64


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

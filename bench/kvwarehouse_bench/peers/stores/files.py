"""One file a page: a temporary name, write, rename; two levels of folders, made before the clock
starts. What file connectors do, without an engine."""

from __future__ import annotations

import os
import shutil
from typing import Any

from kvwarehouse_bench.peers.store import (
    CannotRunError,
    Keyed,
    StampedPages,
    StoreRoom,
    digests,
    leading,
)

_DIRECT = getattr(os, "O_DIRECT", 0)


class Files(Keyed):
    def __init__(self, room: StoreRoom) -> None:
        super().__init__(room)
        self._root = room.folder / "pages"
        self._root.mkdir()
        self._flags = self._direct_flag() if room.disk else 0

    def about(self) -> dict[str, str]:
        how = "O_DIRECT and fsync" if self._flags else "through the page cache"
        synced = "each file fsynced before its rename, and its folder"
        return {
            "version": os.uname().release,
            "layout": f"in process, one file a page, {how}",
            "durability": synced if self.room.disk else "page cache, not synced",
            "lookup": "one access() a key; keys given",
            "start": "",
        }

    def names(self, label: str, count: int) -> Any:
        paths = []
        for digest in digests(label, count):
            name = digest.hexdigest()
            folder = self._root / name[:2]
            folder.mkdir(exist_ok=True)
            paths.append(str(folder / name))
        return paths

    def store(self, names: Any, pages: StampedPages) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | self._flags
        for name, page in zip(names, pages.source, strict=True):
            new = name + ".new"
            descriptor = os.open(new, flags, 0o600)
            try:
                written = os.write(descriptor, page.data)
                if self.room.disk:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if written != len(page):
                raise OSError(f"{new}: {written} of {len(page)} bytes written")
            os.rename(new, name)

    def load(self, names: Any, pages: StampedPages) -> int:
        for at, (name, page) in enumerate(zip(names, pages.target, strict=True)):
            try:
                descriptor = os.open(name, os.O_RDONLY | self._flags)
            except FileNotFoundError:
                return at
            try:
                if os.readv(descriptor, [page.data]) != len(page):
                    return at
            finally:
                os.close(descriptor)
        return len(names)

    def found(self, names: Any) -> int:
        access, there = os.access, os.F_OK
        return leading([access(name, there) for name in names])

    def clear(self) -> None:
        shutil.rmtree(self._root)
        self._root.mkdir()

    def settle(self) -> None:
        """The files are; so that their names are too."""
        for folder in [*self._root.iterdir(), self._root]:
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def drop_caches(self) -> None:
        for path in self._root.rglob("*"):
            if path.is_file():
                forget(str(path))

    def close(self) -> None:
        pass

    def _direct_flag(self) -> int:
        probe = self._root / "probe"
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | _DIRECT, 0o600))
        except OSError:
            return 0
        finally:
            probe.unlink(missing_ok=True)
        return _DIRECT


def forget(path: str) -> None:
    """Takes a file out of this machine's page cache; raises where that is not possible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise CannotRunError(f"the page cache cannot be emptied: {error}") from error
    finally:
        os.close(descriptor)

"""A disk that fails or stalls on demand under one daemon, by a library loaded before its others
(faulty_disk.c beside this file, compiled with the compiler that built the core).

    faulty = FaultyDisk(tmp_path, serving.nvme_dir)
    monkeypatch.setenv(...) for each of faulty.environment(); serve with io_engine="pread"
    faulty.set(write=errno.ENOSPC); ...; faulty.heal()

Calls of files below the given path only. Not thread-safe.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import numpy as np

_SOURCE: Final = Path(__file__).with_name("faulty_disk.c")
_WORDS: Final = 7


class FaultyDisk:
    def __init__(self, folder: Path, path: Path) -> None:
        """Compiles the library into `folder`. Raises FileNotFoundError without a compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise FileNotFoundError("no C compiler (cc or gcc)")
        self._library = folder / "faulty_disk.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", self._library, _SOURCE, "-ldl"], check=True
        )
        self._file, self._path = folder / "faulty_disk_words", path
        np.zeros(_WORDS, np.int32).tofile(self._file)
        self._words = np.memmap(self._file, np.int32, "r+")

    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "FAULTY_DISK_WORDS": str(self._file),
            "FAULTY_DISK_PATH": str(self._path),
        }

    def set(
        self,
        *,
        read: int = 0,
        write: int = 0,
        sync: int = 0,
        delay_s: float = 0,
        every: int = 1,
        core_delay_s: float = 0,
    ) -> None:
        """Errnos of reads, writes and syncs, every so many of them; and how long each call takes
        before that (core_delay_s: each read and write of the core, where that is not 0)."""
        delay_us, core_delay_us = (int(each * 1e6) for each in (delay_s, core_delay_s))
        self._words[:6] = read, write, sync, delay_us, every, core_delay_us

    def heal(self) -> None:
        self.set()

    @property
    def struck(self) -> int:
        """Calls that failed so far."""
        return int(self._words[6])

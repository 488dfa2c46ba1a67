"""The file of a bundle: texts, each bounded and without secrets, in one .tar.gz that only its owner
can read. It is made in memory and written at once. Not thread-safe."""

from __future__ import annotations

import io
import os
import tarfile
import time
from typing import Final

from kvwarehouse.bundle.redaction import Redactor
from kvwarehouse.errors import UsageError

MEMBER_BYTES: Final = 1 << 20
"""Of one text, at most; of a longer one the beginning, or of a log the end, is kept."""

MEMBERS: Final = 32

_FOLDER: Final = "kvwarehouse-bundle"
_MODE: Final = 0o600


class Archive:
    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._texts: dict[str, bytes] = {}

    def add(self, name: str, text: str, *, keep_end: bool = False) -> int:
        """Returns the bytes that were kept. There is no other way in: what comes is redacted."""
        assert name not in self._texts, name
        assert len(self._texts) < MEMBERS, name
        kept = self._redactor.text(text).encode("utf-8", "backslashreplace")
        if len(kept) > MEMBER_BYTES:
            left_out = f"({len(kept) - MEMBER_BYTES:,} bytes left out)\n".encode()
            if keep_end:
                kept = left_out + kept[-MEMBER_BYTES:]
            else:
                kept = kept[:MEMBER_BYTES] + b"\n" + left_out
        self._texts[name] = kept
        return len(kept)

    def write(self, path: str) -> int:
        """Returns the size of the file in bytes. Raises UsageError where it cannot be made, also
        where there is a file already."""
        made = self._packed()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}; name another file with -o",
                code="bad_output",
            ) from error
        try:
            with open(fd, "wb") as file:
                os.fchmod(fd, _MODE)  # whatever the mask of this process is
                file.write(made)
        except OSError as error:
            os.unlink(path)
            raise UsageError(
                f"cannot write {path}: {error.strerror}; name another file with -o",
                code="bad_output",
            ) from error
        return len(made)

    def _packed(self) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            for name, text in self._texts.items():
                about = tarfile.TarInfo(f"{_FOLDER}/{name}")
                about.size, about.mode, about.mtime = len(text), _MODE, int(time.time())
                tar.addfile(about, io.BytesIO(text))
        return out.getvalue()

"""Records of a backup: members of a tar archive (POSIX ustar), read and written one after another.

A record is a name, one JSON object and a payload. Its member's content is the digest of all three
as 64 hex digits, the JSON, each on a line, and the payload. docs/format.md has the layout.

Every byte is judged before it is believed: headers must be what this module writes for the name and
the size, padding must be zeros, content has its digest. The module tarfile makes and reads headers,
and no more: its own reader keeps all members, and takes damage for an archive's end. One owner.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from kvwarehouse.errors import StorageError

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
MAX_FACTS_BYTES: Final = 1 << 20
_DIGEST_BYTES: Final = 32
_DIGEST_LINE: Final = 2 * _DIGEST_BYTES + 1
_MODE: Final = 0o600

Part = bytes | bytearray | memoryview


@dataclass(frozen=True)
class BackupRecord:
    name: str
    facts: dict[str, Any]
    payload: memoryview


@dataclass(frozen=True)
class RecordHead:
    """The beginning of a record: its content has not been read yet."""

    name: str
    size_bytes: int


class RecordWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._all = _hasher()
        self.written_bytes = 0

    @property
    def digest(self) -> str:
        """Of the digests of all records so far, so of all that was written."""
        return self._all.hexdigest()

    def write(self, name: str, facts: dict[str, Any], payload: Iterable[Part] = ()) -> None:
        """Payload: parts in C order. Raises OSError."""
        line = json.dumps(facts, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
        parts = [memoryview(part).cast("B") for part in payload]
        digest = _digest(name, line, parts) + b"\n"
        size_bytes = len(digest) + len(line) + sum(len(part) for part in parts)
        self._all.update(digest)
        padding = bytes(-size_bytes % BLOCK)
        whole: list[Part] = [_header(name, size_bytes) + digest + line, *parts, padding]
        for part in whole:
            self._file.write(part)
            self.written_bytes += len(part)

    def end(self) -> None:
        self._file.write(END)
        self.written_bytes += len(END)


class RecordReader:
    """Raises StorageError: code "backup_cut" where the file ends early, "backup_damaged" where
    bytes are not what was written, "backup_foreign" where it is no backup from its first byte on.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._all = _hasher()
        self.read_bytes = 0

    @property
    def digest(self) -> str:
        """As RecordWriter.digest."""
        return self._all.hexdigest()

    def head(self) -> RecordHead:
        at = self.read_bytes
        block = bytes(self._take(BLOCK))
        try:
            found = tarfile.TarInfo.frombuf(block, "ascii", "strict")
            name, size_bytes = found.name, found.size
            good = size_bytes >= 0 and block == _header(name, size_bytes)
        except (tarfile.HeaderError, ValueError):
            good = False
        if good:
            return RecordHead(name, size_bytes)
        if at == 0:
            raise StorageError(
                "this is no backup: it does not begin as a file of `kvwarehouse export` does; if it"
                " was compressed, unpack it first",
                code="backup_foreign",
            )
        raise self.damaged(f"what lies at byte {at:,} is no record")

    def content(self, head: RecordHead, most_payload_bytes: int = 0) -> BackupRecord:
        """The record's verified content, in memory of its own."""
        facts, payload, digest = self._read(head, most_payload_bytes)
        if digest[:-1] != _digest(head.name, facts, [payload]) or digest[-1:] != b"\n":
            raise self.damaged(f"the record {head.name} is not what was written")
        self._all.update(digest)
        try:
            value = json.loads(facts)
        except (ValueError, RecursionError):  # the latter of brackets in thousands of brackets
            value = None
        if not isinstance(value, dict):
            raise self.damaged(f"the record {head.name} says nothing that can be read")
        return BackupRecord(head.name, value, payload)

    def _read(self, head: RecordHead, most_payload_bytes: int) -> tuple[bytes, memoryview, bytes]:
        size_bytes = head.size_bytes
        if not _DIGEST_LINE < size_bytes <= _DIGEST_LINE + MAX_FACTS_BYTES + most_payload_bytes:
            raise self.damaged(f"the record {head.name} cannot have {size_bytes:,} bytes")
        content = self._take(size_bytes)
        if any(self._take(-size_bytes % BLOCK)):
            raise self.damaged(f"what follows the record {head.name} is not empty")
        end = content.find(b"\n", _DIGEST_LINE, _DIGEST_LINE + MAX_FACTS_BYTES) + 1
        if end == 0 or size_bytes - end > most_payload_bytes:
            raise self.damaged(f"the record {head.name} is not what was written")
        facts = bytes(content[_DIGEST_LINE:end])
        return facts, memoryview(content)[end:], bytes(content[:_DIGEST_LINE])

    def end(self) -> None:
        """Nothing but the archive's end may follow."""
        if any(self._take(len(END))) or self._file.read(1):
            raise self.damaged("bytes follow its last record")

    def damaged(self, what: str) -> StorageError:
        return StorageError(
            f"the backup is damaged: {what}; take another copy of it, or export it again (what was"
            " verified before this place is right)",
            code="backup_damaged",
            context={"at": self.read_bytes},
        )

    def _take(self, size_bytes: int) -> bytearray:
        taken = bytearray(size_bytes)
        view, filled = memoryview(taken), 0
        while filled < size_bytes:
            more = self._file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not more:
                raise StorageError(
                    f"the backup ends at byte {self.read_bytes + filled:,}, before its end: its"
                    " export or its copy was cut off; copy it, or export it, again",
                    code="backup_cut",
                    context={"at": self.read_bytes + filled},
                )
            filled += more
        self.read_bytes += size_bytes
        return taken


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"kvw backup")


def _digest(name: str, facts: bytes, payload: Iterable[Part]) -> bytes:
    state = _hasher()
    state.update(name.encode("ascii") + b"\n" + facts)
    for part in payload:
        state.update(part)
    return state.hexdigest().encode("ascii")


def _header(name: str, size_bytes: int) -> bytes:
    made = tarfile.TarInfo(name)
    made.size, made.mode = size_bytes, _MODE
    return made.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")

"""A backup, version 1: what its records mean and in what order they come.

    kvwarehouse-backup          what it is: format, version, which warehouse it is of
    namespaces/ID               one for each namespace: its fields, but of a salt a digest
    pages/ID/NUMBER             one for each page, all shards; a page after its parent
    end                         how many there were, and a digest of all records

One owner. docs/format.md has every field.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from kvwarehouse import atomic_file
from kvwarehouse.backup.records import BackupRecord, Part, RecordHead, RecordReader, RecordWriter
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.errors import StorageError, UsageError
from kvwarehouse.types import Namespace

VERSION: Final = 1
FORMAT: Final = "kvwarehouse-backup"
_END: Final = "end"
_NAMESPACE: Final = re.compile(r"namespaces/([0-9a-f]{32})")
_PAGE: Final = re.compile(r"pages/([0-9a-f]{32})/([0-9]{12})")
_MAX_NAMESPACES: Final = 4096


@dataclass(frozen=True)
class BackupNamespace:
    id: bytes
    fields: Mapping[str, Any]
    """As Namespace.to_fields; of a salt a digest, as listings have it."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shards, bytes of each, tokens of a page."""
        fields = self.fields
        return fields["shards"], fields["page_bytes"], fields["page_tokens"]

    @property
    def page_bytes(self) -> int:
        """Of all shards."""
        return int(self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class BackupPage:
    namespace: BackupNamespace
    number: int
    parent: int | None
    """Its number."""
    position: int
    witness: bytes
    by_tokens: bool
    payload: memoryview
    """All shards, one after another."""


class BackupWriter:
    """Raises OSError where the file cannot be written."""

    def __init__(
        self, file: BinaryIO, warehouse_id: str, spaces: Iterable[StoredNamespace]
    ) -> None:
        self._records = RecordWriter(file)
        self.pages = 0
        self.payload_bytes = 0
        facts = {"format": FORMAT, "version": VERSION, "warehouse_id": warehouse_id}
        self._records.write(FORMAT, facts)
        self._namespaces = 0
        for space in spaces:
            self._records.write(f"namespaces/{space.id.hex()}", {"fields": dict(space.fields)})
            self._namespaces += 1

    @property
    def written_bytes(self) -> int:
        return self._records.written_bytes

    def page(
        self,
        namespace_id: bytes,
        place: tuple[int, int | None],
        witness: tuple[bool, bytes],
        shards: Iterable[Part],
    ) -> int:
        """place: position and the parent's number. witness: whether it is tokens, and what it is.
        Returns the page's number."""
        by_tokens, text = witness
        parts = list(shards)
        facts = {
            "position": place[0],
            "parent": place[1],
            "tokens" if by_tokens else "engine_key": base64.b64encode(text).decode("ascii"),
        }
        number = self.pages
        self._records.write(f"pages/{namespace_id.hex()}/{number:012}", facts, parts)
        self.pages += 1
        self.payload_bytes += sum(len(part) for part in parts)
        return number

    def end(self) -> None:
        """Without it the file is refused as one that was cut off."""
        facts = {
            "namespaces": self._namespaces,
            "pages": self.pages,
            "payload_bytes": self.payload_bytes,
            "digest": self._records.digest,
        }
        self._records.write(_END, facts)
        self._records.end()


class BackupReader:
    """Reads the header and the namespaces when it is made. Raises StorageError as RecordReader
    does, also with code "backup_newer"."""

    def __init__(self, file: BinaryIO) -> None:
        self._records = RecordReader(file)
        self.warehouse_id = self._begin()
        self.namespaces: dict[bytes, BackupNamespace] = {}
        self._head = self._records.head()
        while found := _NAMESPACE.fullmatch(self._head.name):
            self._add_namespace(bytes.fromhex(found[1]))
            self._head = self._records.head()
        self._pages = 0
        self._payload_bytes = 0
        self._above: list[BackupPage] = []  # the last page's way from its root, itself the last

    @property
    def read_bytes(self) -> int:
        return self._records.read_bytes

    def pages(self) -> Iterator[BackupPage]:
        """Each verified, in the file's order; at their end the file's end is verified."""
        while found := _PAGE.fullmatch(self._head.name):
            yield self._page(bytes.fromhex(found[1]), int(found[2]))
            self._head = self._records.head()
        self._check_end(self._head)

    def _begin(self) -> str:
        head = self._records.head()
        if head.name != FORMAT:
            raise StorageError(
                f"this is a tar archive and no backup: it begins with {head.name!r}; give a file"
                " that `kvwarehouse export` wrote",
                code="backup_foreign",
            )
        record = self._records.content(head)
        version = record.facts.get("version")
        if type(version) is int and version > VERSION:
            raise StorageError(
                f"the backup is of version {version}, and this kvwarehouse reads up to {VERSION};"
                " use the version that wrote it, or a later one",
                code="backup_newer",
                context={"version": version},
            )
        if version != VERSION or record.facts.get("format") != FORMAT:
            raise self._records.damaged("its header has no version")
        return str(record.facts.get("warehouse_id", ""))

    def _add_namespace(self, namespace_id: bytes) -> None:
        fields = self._records.content(self._head).facts.get("fields")
        if len(self.namespaces) >= _MAX_NAMESPACES or namespace_id in self.namespaces:
            raise self._records.damaged(f"namespace {namespace_id.hex()} comes twice")
        try:
            Namespace.from_fields(fields if isinstance(fields, dict) else {})
        except (UsageError, TypeError) as error:
            raise self._records.damaged(
                f"namespace {namespace_id.hex()} is none: {error}"
            ) from error
        assert isinstance(fields, dict)
        self.namespaces[namespace_id] = BackupNamespace(namespace_id, fields)

    def _page(self, namespace_id: bytes, number: int) -> BackupPage:
        namespace = self.namespaces.get(namespace_id)
        if namespace is None or number != self._pages:
            raise self._records.damaged(f"the record {self._head.name} is not in its place")
        record = self._records.content(self._head, namespace.page_bytes)
        page = _page_of(namespace, number, record)
        if page is None or not self._follows(page):
            raise self._records.damaged(f"the record {record.name} is no page of its namespace")
        self._pages += 1
        self._payload_bytes += len(record.payload)
        return page

    def _follows(self, page: BackupPage) -> bool:
        """Whether its parent is where pre-order has it."""
        if page.position > len(self._above):
            return False
        del self._above[page.position :]
        if self._above:
            parent = self._above[-1]
            above = (parent.number, parent.namespace, parent.by_tokens)
            if above != (page.parent, page.namespace, page.by_tokens):
                return False
        self._above.append(dataclasses.replace(page, payload=memoryview(b""), witness=b""))
        return True

    def _check_end(self, head: RecordHead) -> None:
        if head.name != _END:
            raise self._records.damaged(f"the record {head.name!r} is of no kind that is known")
        counted = {
            "namespaces": len(self.namespaces),
            "pages": self._pages,
            "payload_bytes": self._payload_bytes,
            "digest": self._records.digest,
        }
        if self._records.content(head).facts != counted:
            raise self._records.damaged("it has other records than it had when it was written")
        self._records.end()


def _page_of(namespace: BackupNamespace, number: int, record: BackupRecord) -> BackupPage | None:
    """None where the record cannot be a page of it."""
    facts = record.facts
    position, parent = facts.get("position"), facts.get("parent")
    by_tokens = "tokens" in facts
    try:
        witness = base64.b64decode(
            facts.get("tokens" if by_tokens else "engine_key", 0), validate=True
        )
    except (TypeError, ValueError):
        return None
    page_tokens = namespace.shape[2]
    fits = len(witness) == 4 * page_tokens if by_tokens else 1 <= len(witness) <= 64
    child = type(parent) is int and 0 <= parent < number
    if not (
        fits
        and len(record.payload) == namespace.page_bytes
        and type(position) is int
        and (child if position > 0 else position == 0 and parent is None)
    ):
        return None
    return BackupPage(namespace, number, parent, position, witness, by_tokens, record.payload)


@contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """As atomic_file.replacing, but what is no file is not replaced, and what cannot be written
    raises StorageError (code "backup_unwritable")."""
    try:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(0, "it is there, and is no file")
        with atomic_file.replacing(path) as file:
            yield file
    except OSError as error:
        raise StorageError(
            f"the backup {path} cannot be written: {error.strerror}; give a path in a folder of"
            " yours with room on its disk, or - for the standard output",
            code="backup_unwritable",
            context={"path": path},
        ) from error

"""The file of `kvwarehouse export`: what is damaged, cut, foreign or newer is refused, and no page
is handed on that is not as it was written."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvwarehouse import Namespace
from kvwarehouse.backup import BackupReader, BackupWriter, new_file, records
from kvwarehouse.backup.backup_file import FORMAT, VERSION
from kvwarehouse.backup.records import BLOCK, BackupRecord, RecordReader, RecordWriter
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.errors import StorageError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "backup-1.kvw"

_STRIDE = 5  # bytes; each run begins elsewhere

TOKENS = Namespace("a", "w", "uint8", "t/1", page_tokens=4, page_bytes=100, shards=2)
KEYS = Namespace("b", "w", "uint8", "t/1", page_tokens=4, page_bytes=700, hash_scheme="engine/1")


class Written(NamedTuple):
    space: bytes
    position: int
    parent: int | None
    by_tokens: bool
    witness: bytes
    payload: bytes


def stored(space: Namespace) -> StoredNamespace:
    return StoredNamespace(space.id, space.shown_fields(), 0, 0, 0)


def pages() -> list[Written]:
    """A prompt of three pages, another that shares its first, and one page by a key."""
    chain = [(0, None), (1, 0), (2, 1), (1, 0)]
    made = [
        Written(TOKENS.id, position, parent, True, bytes([at]) * 16, bytes([at]) * 200)
        for at, (position, parent) in enumerate(chain)
    ]
    return [*made, Written(KEYS.id, 0, None, False, b"key", b"k" * 700)]


def backup() -> bytes:
    file = io.BytesIO()
    writer = BackupWriter(file, "ab" * 16, map(stored, (TOKENS, KEYS)))
    for page in pages():
        half = len(page.payload) // 2
        shards = [page.payload[:half], np.frombuffer(page.payload[half:], np.uint8).data]
        place, witness = (page.position, page.parent), (page.by_tokens, page.witness)
        writer.page(page.space, place, witness, shards)
    writer.end()
    assert writer.written_bytes == len(file.getvalue())
    return file.getvalue()


def read(data: bytes, into: list[Written] | None = None) -> list[Written]:
    """The pages; they are in `into` where something is raised."""
    into = [] if into is None else into
    for page in BackupReader(io.BytesIO(data)).pages():
        into.append(
            Written(
                page.namespace.id,
                page.position,
                page.parent,
                page.by_tokens,
                page.witness,
                bytes(page.payload),
            )
        )
    return into


def refused(data: bytes) -> str:
    """By which code; what came before is as it was written."""
    before: list[Written] = []
    with pytest.raises(StorageError) as caught:
        read(data, before)
    assert before == pages()[: len(before)]
    return caught.value.code


def test_backup_reads_as_it_was_written() -> None:
    reader = BackupReader(io.BytesIO(backup()))
    assert reader.warehouse_id == "ab" * 16
    assert [each.fields["model"] for each in reader.namespaces.values()] == ["a", "b"]
    assert read(backup()) == pages()


def test_backup_of_version_1_is_read_by_every_later_version() -> None:
    """The file is what `backup()` wrote when version 1 was made. Never make it anew: a new version
    has a file of its own beside it."""
    kept = FIXTURE.read_bytes()
    assert read(kept) == pages()
    assert kept == backup() or VERSION > 1, "what is written has changed, so the version rises"


def test_backup_is_a_tar_archive_that_other_programs_list() -> None:
    with tarfile.open(fileobj=io.BytesIO(backup())) as archive:
        names = archive.getnames()
    assert names[0] == FORMAT
    assert names[-2:] == [f"pages/{KEYS.id.hex()}/000000000004", "end"]


def test_backup_is_refused_whichever_byte_is_flipped(rng: random.Random) -> None:
    data = backup()
    for at in range(rng.randrange(_STRIDE), len(data), _STRIDE):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        assert refused(bytes(flipped)) in ("backup_damaged", "backup_foreign", "backup_cut"), at


def test_backup_is_refused_wherever_it_is_cut() -> None:
    data = backup()
    blocks = set(range(0, len(data), BLOCK))
    for end in sorted(blocks | {at + 1 for at in blocks} | {at - 1 for at in blocks if at}):
        assert refused(data[:end]) == "backup_cut", end


def test_backup_without_its_end_is_refused_where_the_archive_is_whole() -> None:
    """As tar makes one of what an export that ended early has written."""
    file = io.BytesIO()
    BackupWriter(file, "ab" * 16, [stored(TOKENS)])
    assert refused(file.getvalue() + bytes(2 * BLOCK)) == "backup_damaged"


def test_backup_with_bytes_behind_its_end_is_refused() -> None:
    assert refused(backup() + b"\0") == "backup_damaged"


@pytest.mark.parametrize("data", [gzip.compress(backup()), b"x" * 4096, bytes(4096)])
def test_file_that_is_no_backup_is_refused_as_such(data: bytes) -> None:
    assert refused(data) == "backup_foreign"


def test_archive_of_something_else_is_refused_as_foreign() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        member = tarfile.TarInfo("notes.txt")
        member.mode = 0o600
        archive.addfile(member)
    assert refused(file.getvalue()) == "backup_foreign"


def test_newer_version_is_refused_by_its_number() -> None:
    file = io.BytesIO()
    records = RecordWriter(file)
    records.write(FORMAT, {"format": FORMAT, "version": VERSION + 1, "who": "knows"})
    with pytest.raises(StorageError, match=f"version {VERSION + 1}") as caught:
        read(file.getvalue())
    assert caught.value.code == "backup_newer"


class Edited:
    """The records of a backup, to be written again in another way."""

    def __init__(self) -> None:
        reader = RecordReader(io.BytesIO(backup()))
        self.records: list[BackupRecord] = []
        self.end: dict[str, Any] = {}
        """What the end says otherwise."""
        while not self.records or self.records[-1].name != "end":
            self.records.append(reader.content(reader.head(), 1000))

    def written(self) -> bytes:
        """Each with its digest, and an end that says what there is."""
        file = io.BytesIO()
        writer = RecordWriter(file)
        *records, end = self.records
        for record in records:
            writer.write(record.name, record.facts, [record.payload])
        told = {
            "namespaces": sum(each.name.startswith("namespaces/") for each in records),
            "pages": sum(each.name.startswith("pages/") for each in records),
            "payload_bytes": sum(len(each.payload) for each in records),
            "digest": writer.digest,
        }
        writer.write(end.name, {**told, **self.end})
        writer.end()
        return file.getvalue()

    def change(self, at: int, **facts: Any) -> None:
        record = self.records[at]
        self.records[at] = BackupRecord(record.name, {**record.facts, **facts}, record.payload)


def _swap(edited: Edited) -> None:
    edited.records[4], edited.records[5] = edited.records[5], edited.records[4]


def _repeat_namespace(edited: Edited) -> None:
    edited.records.insert(2, edited.records[1])
    edited.end["namespaces"] = 2


@pytest.mark.parametrize(
    "edit",
    [
        _swap,
        lambda edited: edited.records.pop(4),
        lambda edited: edited.records.pop(5),
        lambda edited: edited.records.pop(1),
        _repeat_namespace,
        lambda edited: edited.change(4, parent=None),
        lambda edited: edited.change(4, parent=1),
        lambda edited: edited.change(5, position=3),
        lambda edited: edited.change(4, position=True),
        lambda edited: edited.change(4, tokens="AAAA"),
        lambda edited: edited.change(4, tokens=7),
        lambda edited: edited.change(7, engine_key=""),
        lambda edited: edited.change(1, fields={"model": "a"}),
        lambda edited: edited.change(1, fields=None),
        lambda edited: edited.change(0, version="1"),
        lambda edited: edited.change(7, position=1, parent=3),
        lambda edited: edited.end.update(pages=4),
        lambda edited: edited.end.update(namespaces=1),
        lambda edited: edited.end.update(payload_bytes=0),
        lambda edited: edited.end.update(digest="00"),
    ],
)
def test_records_that_do_not_fit_each_other_are_refused(edit: Callable[[Edited], Any]) -> None:
    """Each is good by itself: as if pieces of several backups had been put together."""
    edited = Edited()
    assert read(edited.written()) == pages(), "what is not edited is taken"
    edit(edited)
    assert refused(edited.written()) == "backup_damaged"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[1]", "nothing"])
def test_record_whose_facts_are_no_object_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Its digest is good: somebody made it so. Nested deeper than the interpreter reads, it was a
    traceback."""
    file = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(records.json, "dumps", lambda *args, **options: text)
        RecordWriter(file).write(FORMAT, {})
    assert refused(file.getvalue()) == "backup_damaged"


def test_salt_is_in_no_byte_of_a_backup() -> None:
    file = io.BytesIO()
    salted = Namespace(**{**TOKENS.to_fields(), "salt": "tenant secret"})
    BackupWriter(file, "ab" * 16, [stored(salted)]).end()
    assert b"tenant secret" not in file.getvalue()
    assert b"sha256:" in file.getvalue()


def test_file_is_there_once_it_is_whole_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "backup.kvw"
    path.write_text("old")
    with new_file(str(path)) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_file_stays_as_it_was_where_the_export_fails(tmp_path: Path) -> None:
    path = tmp_path / "backup.kvw"
    path.write_text("old")
    opened = new_file(str(path))
    opened.__enter__().write(b"half")
    assert len(list(tmp_path.iterdir())) == 2
    error = KeyboardInterrupt()
    assert not opened.__exit__(type(error), error, None)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_each_leave_a_whole_one(tmp_path: Path) -> None:
    """Incident: in two containers both exports were the process of the same number. The one took
    the other's scratch file for a killed one's, and its half was there as the other's whole."""
    path = tmp_path / "backup.kvw"
    with new_file(str(path)) as second:
        with new_file(str(path)) as first:
            first.write(b"first")
            second.write(b"sec")
            second.flush()
        assert path.read_bytes() == b"first"
        second.write(b"ond")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("x", path)])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "there")
    with (
        pytest.raises(StorageError, match="is no file") as caught,
        new_file(str(tmp_path / "there")),
    ):
        pytest.fail("it was opened")
    assert caught.value.code == "backup_unwritable"
    assert os.listdir(tmp_path) == ["there"]


def test_facts_of_a_record_are_one_line_of_json() -> None:
    """docs/format.md says so, for programs that read a backup without this package."""
    with tarfile.open(fileobj=io.BytesIO(backup())) as archive:
        content = archive.extractfile(archive.getmembers()[3])
        assert content is not None
        digest, facts, payload = content.read().split(b"\n", 2)
    assert len(digest) == 64
    assert json.loads(facts) == {
        "position": 0,
        "parent": None,
        "tokens": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    assert payload == bytes(200)

"""The warehouse's identity: one for all its directories, or a clear refusal."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import struct
from pathlib import Path

import pytest

from kvwarehouse.daemon import identity
from kvwarehouse.daemon.identity import WarehouseIdentity, establish
from kvwarehouse.daemon.logs import Log
from kvwarehouse.errors import StorageError
from kvwarehouse.fleet import FleetSecret

FLEET = FleetSecret.derive(bytes(32))
LOG = Log("json", io.StringIO())


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    for name in ("nvme", "arena"):
        (tmp_path / name).mkdir(mode=0o700)
    return [str(tmp_path / "nvme"), str(tmp_path / "arena")]


def settle(places: list[str]) -> WarehouseIdentity:
    return establish(places, Log("json", io.StringIO()))


def said(places: list[str], who: WarehouseIdentity) -> list[tuple[str, str, str]]:
    """Event, level and path of each line of a start, which has to find `who`."""
    stream = io.StringIO()
    assert establish(places, Log("json", stream)) == who
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [(line["event"], line["level"], line["path"]) for line in lines]


def refused(places: list[str]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        settle(places)
    return caught.value


def files_of(place: str) -> list[Path]:
    return [Path(place, name) for name in identity.FILE_NAMES]


def contents(places: list[str]) -> list[bytes]:
    return [file.read_bytes() for place in places for file in files_of(place)]


def full(monkeypatch: pytest.MonkeyPatch, code: int, paths: list[Path]) -> None:
    """Writes of `paths` fail from here on."""
    write_atomic = identity.write_atomic

    def write(path: str, data: bytes) -> None:
        if Path(path) in paths:
            raise OSError(code, os.strerror(code), path)
        write_atomic(path, data)

    monkeypatch.setattr(identity, "write_atomic", write)


def test_identity_is_made_once_and_stays(places: list[str]) -> None:
    first = settle(places)
    assert settle(places) == first
    assert settle(places[:1]) == first
    assert settle(places[1:]) == first


def test_identity_is_private_and_complete(places: list[str]) -> None:
    who = settle(places)
    assert (len(who.warehouse_id), len(who.secret)) == (16, 192)
    for place in places:
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in files_of(place))
        assert sorted(os.listdir(place)) == sorted(identity.FILE_NAMES)
    assert len(set(contents(places))) == 1
    assert who.secret.hex() not in repr(who)
    assert repr(who.secret) not in repr(who)


def test_secret_of_a_fleet_is_that_of_a_new_identity_and_its_id_is_not(places: list[str]) -> None:
    first, second = (establish([place], LOG, FLEET) for place in places)
    assert first.fleet == second.fleet == FLEET
    assert first.warehouse_id != second.warehouse_id
    assert settle(places[:1]) == first  # without the fleet's file it is served as it is


@pytest.mark.parametrize("have", [[0], [1], [0, 1]])
def test_identity_of_another_secret_is_refused_before_anything_is_written(
    places: list[str], have: list[int]
) -> None:
    stored = [places[each] for each in have]
    who = settle(stored)
    files_of(stored[0])[0].write_bytes(b"damaged")
    before = {file: file.read_bytes() for place in places for file in Path(place).iterdir()}
    with pytest.raises(StorageError) as caught:
        establish(places, LOG, FLEET)
    assert caught.value.code == "fleet_secret_differs"
    for text in (*stored, who.fleet.fleet_id.hex(), FLEET.fleet_id.hex()):
        assert text in caught.value.message
    assert {file: file.read_bytes() for place in places for file in Path(place).iterdir()} == before


@pytest.mark.parametrize("lost", [0, 1])
def test_identity_is_adopted_by_a_directory_that_has_none(places: list[str], lost: int) -> None:
    first = settle(places)
    for file in files_of(places[lost]):
        file.unlink()
    assert said(places, first) == [("identity_adopted", "info", places[lost])]
    assert len(set(contents(places))) == 1


def test_directories_of_two_warehouses_are_refused_by_name(places: list[str]) -> None:
    ids = [settle([place]).warehouse_id.hex() for place in places]
    before = contents(places)
    error = refused(places)
    assert error.code == "foreign_directory"
    for text in (*ids, *places):
        assert text in error.message
    assert contents(places) == before


@pytest.mark.parametrize("copies", ["damaged", "missing"])
def test_directory_without_a_good_copy_is_of_whose_files_it_has(
    places: list[str], tmp_path: Path, copies: str
) -> None:
    """Incident: another warehouse's directory of which all copies were damaged was mended with
    this one's identity, and its ledger set aside."""
    who = settle(places)
    (tmp_path / "nvme" / "segments").mkdir()
    segments = [tmp_path / "nvme" / "segments" / f"{number:08d}.seg" for number in range(3)]
    for file in segments:
        file.write_bytes(b"KVWSEGMT" + os.urandom(100) + bytes(5000))
    for file in files_of(places[0]):
        file.write_bytes(b"damaged") if copies == "damaged" else file.unlink()
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    error = refused(places)
    assert error.code == "foreign_directory"
    assert places[0] in error.message
    assert who.warehouse_id.hex() in error.message
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    segments[2].write_bytes(b"KVWSEGMT" + bytes(50) + who.warehouse_id + bytes(5000))
    assert settle(places) == who
    assert settle(places[:1]) == who


def test_copies_of_two_warehouses_in_one_directory_are_refused(places: list[str]) -> None:
    for place in places:
        settle([place])
    files_of(places[0])[1].write_bytes(files_of(places[1])[1].read_bytes())
    error = refused(places[:1])
    assert error.code == "foreign_directory"
    for file in files_of(places[0]):
        assert str(file) in error.message


def test_any_flipped_bit_is_seen(places: list[str]) -> None:
    settle(places[:1])
    good = contents(places[:1])[0]
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(identity._DamagedError):
            identity._decode("identity", bytes(data))


def test_any_flipped_byte_of_one_copy_is_mended(
    places: list[str], rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of mendings
    who = settle(places[:1])
    good = contents(places[:1])[0]
    for file in files_of(places[0]):
        for place in range(len(good)):
            data = bytearray(good)
            data[place] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            assert said(places[:1], who) == [("identity_mended", "warning", str(file))]
            assert contents(places[:1]) == [good, good]


def damaged(good: bytes, damage: str, rng: random.Random) -> bytes:
    flipped = bytearray(good)
    flipped[40] ^= 1
    return {
        "empty": b"", "cut": good[:-1], "longer": good + b"x", "flipped": bytes(flipped),
        "other": rng.randbytes(len(good)), "zeroed": bytes(len(good)),
    }[damage]  # fmt: skip


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "flipped", "other", "zeroed"])
def test_identity_without_a_good_copy_is_refused_and_left_as_it_is(
    places: list[str], rng: random.Random, damage: str
) -> None:
    who = settle(places)
    good = contents(places)[0]
    for file in files_of(places[0]):
        file.write_bytes(damaged(good, damage, rng))
    before = contents(places[:1])
    error = refused(places[:1])
    assert error.code == "bad_identity"
    for text in (*map(str, files_of(places[0])), "copy a good one", f"empty {places[0]}"):
        assert text in error.message
    assert contents(places[:1]) == before
    mended = [("identity_mended", "warning", str(file)) for file in files_of(places[0])]
    assert said(places, who) == mended
    assert said(places, who) == []
    assert contents(places) == [good] * 4


def test_damaged_identity_is_refused_beside_a_new_directory(places: list[str]) -> None:
    settle(places[:1])
    for file in files_of(places[0]):
        file.write_bytes(b"")
    assert refused(places).code == "bad_identity"
    assert os.listdir(places[1]) == []


def test_last_good_copy_mends_all_others(places: list[str]) -> None:
    who = settle(places)
    good = contents(places)[0]
    files = [file for place in places for file in files_of(place)]
    for last in files:
        for file in files:
            file.write_bytes(good if file is last else b"")
        assert len(said(places, who)) == len(files) - 1
        assert contents(places) == [good] * len(files)


def test_directory_of_an_older_daemon_is_given_its_copy_quietly(places: list[str]) -> None:
    who = settle(places)
    for place in places:
        files_of(place)[1].unlink()
    assert said(places, who) == []
    assert len(set(contents(places))) == 1


def test_first_copy_that_is_missing_is_mended(places: list[str]) -> None:
    who = settle(places)
    lost = files_of(places[0])[0]
    lost.unlink()
    assert identity.is_in(places[0])
    assert said(places, who) == [("identity_mended", "warning", str(lost))]
    assert len(set(contents(places))) == 1


def test_directory_without_a_copy_is_of_no_warehouse(places: list[str]) -> None:
    assert not identity.is_in(places[0])
    settle(places)
    assert identity.is_in(places[0])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_copy_that_finds_no_room_is_said_and_written_later(
    places: list[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    who = settle(places)
    first, second = files_of(places[0])
    for file, is_there in ((second, False), (first, False), (first, True)):
        file.unlink()
        if is_there:
            file.write_bytes(b"")
            file.chmod(0o600)
        with monkeypatch.context() as patch:
            full(patch, code, [file])
            assert said(places, who) == [("identity_not_mended", "warning", str(file))]
        settle(places)
        assert len(set(contents(places))) == 1


def test_new_directory_needs_room_for_one_copy(
    places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = files_of(places[0])
    with monkeypatch.context() as patch:
        full(patch, errno.ENOSPC, [first])
        assert refused(places).code == "identity_unwritable"
        assert os.listdir(places[0]) == []
    full(monkeypatch, errno.ENOSPC, [second])
    settle(places)
    assert os.listdir(places[0]) == [first.name]


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN])
def test_copy_on_a_bad_sector_is_mended(
    places: list[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    who = settle(places)
    bad = files_of(places[0])[0]
    opened = os.open

    def open_(path: str, flags: int, *rest: int) -> int:
        if Path(path) == bad and flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(code, os.strerror(code), path)
        return opened(path, flags, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        assert said(places, who) == [("identity_mended", "warning", str(bad))]


@pytest.mark.parametrize("more", [b"", b"what version 2 has more"])
@pytest.mark.parametrize("name", identity.FILE_NAMES)
def test_identity_of_a_newer_version_is_refused_and_left_as_it_is(
    places: list[str], name: str, more: bytes
) -> None:
    settle(places[:1])
    file = Path(places[0], name)
    body = file.read_bytes()[:-32] + more
    body = body[:8] + struct.pack("<I", 2) + body[12:]
    file.write_bytes(body + identity._checksum(body))
    before = contents(places[:1])
    error = refused(places)
    assert str(file) in error.message
    assert "version 2" in error.message
    assert contents(places[:1]) == before


@pytest.mark.parametrize("name", identity.FILE_NAMES)
def test_identity_that_others_can_read_is_refused(places: list[str], name: str) -> None:
    settle(places)
    Path(places[0], name).chmod(0o640)
    assert "chmod 600" in refused(places).message


@pytest.mark.parametrize("name", identity.FILE_NAMES)
def test_identity_through_a_link_is_refused(places: list[str], tmp_path: Path, name: str) -> None:
    settle(places)
    file = Path(places[0], name)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert str(file) in refused(places).message


def test_half_written_identity_of_a_crash_is_no_identity(places: list[str]) -> None:
    halves = {f"{name}.{'7' * 16}.tmp" for name in identity.FILE_NAMES}
    for half in halves:
        Path(places[0], half).write_bytes(b"half")
    settle(places)
    assert set(os.listdir(places[0])) == {*identity.FILE_NAMES, *halves}


def test_write_that_fails_leaves_nothing_behind(
    places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    assert refused(places).code == "identity_unwritable"
    assert os.listdir(places[0]) == []

"""The warehouse's identity: one for all its directories, or a clear refusal."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from kvwarehouse import engine
from kvwarehouse.daemon import identity
from kvwarehouse.daemon.identity import Identity, establish
from kvwarehouse.daemon.logs import Log
from kvwarehouse.errors import StorageError


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    for name in ("nvme", "arena"):
        (tmp_path / name).mkdir(mode=0o700)
    return [str(tmp_path / "nvme"), str(tmp_path / "arena")]


def settle(places: list[str]) -> Identity:
    return establish(places, Log("json", io.StringIO()))


def refused(places: list[str]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        settle(places)
    return caught.value


def file_of(place: str) -> Path:
    return Path(place, identity.FILE_NAME)


def test_identity_is_made_once_and_stays(places: list[str]) -> None:
    first = settle(places)
    assert settle(places) == first
    assert settle(places[:1]) == first
    assert settle(places[1:]) == first


def test_identity_is_private_and_complete(places: list[str]) -> None:
    who = settle(places)
    assert (len(who.warehouse_id), len(who.secret)) == (16, 192)
    assert identity.SECRET_BYTES == engine.SECRET_BYTES
    for place in places:
        assert file_of(place).stat().st_mode & 0o777 == 0o600
        assert os.listdir(place) == [identity.FILE_NAME]
    assert who.secret.hex() not in repr(who)
    assert repr(who.secret) not in repr(who)


@pytest.mark.parametrize("lost", [0, 1])
def test_identity_is_adopted_by_a_directory_that_has_none(places: list[str], lost: int) -> None:
    first = settle(places)
    file_of(places[lost]).unlink()
    assert settle(places) == first
    assert file_of(places[lost]).read_bytes() == file_of(places[1 - lost]).read_bytes()


def test_directories_of_two_warehouses_are_refused_by_name(places: list[str]) -> None:
    ids = [settle([place]).warehouse_id.hex() for place in places]
    before = [file_of(place).read_bytes() for place in places]
    error = refused(places)
    assert error.code == "foreign_directory"
    for text in (*ids, *places):
        assert text in error.message
    assert [file_of(place).read_bytes() for place in places] == before


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "flipped", "other", "zeroed"])
def test_damaged_identity_is_refused_and_left_as_it_is(places: list[str], damage: str) -> None:
    settle(places)
    file = file_of(places[0])
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[40] ^= 1
    damaged = {
        "empty": b"", "cut": bytes(data[:-1]), "longer": bytes(data) + b"x",
        "flipped": bytes(data), "other": os.urandom(len(data)), "zeroed": bytes(len(data)),
    }[damage]  # fmt: skip
    file.write_bytes(damaged)
    error = refused(places)
    assert str(file) in error.message
    assert "copy the file" in error.message
    assert file.read_bytes() == damaged


def test_identity_of_a_newer_version_is_refused(places: list[str]) -> None:
    who = settle(places[:1])
    body = identity._BODY.pack(identity._MAGIC, 2, who.warehouse_id, who.secret)
    file_of(places[0]).write_bytes(body + identity._checksum(body))
    assert "version 2" in refused(places).message


def test_identity_that_others_can_read_is_refused(places: list[str]) -> None:
    settle(places)
    file_of(places[0]).chmod(0o640)
    assert "chmod 600" in refused(places).message


def test_identity_through_a_link_is_refused(places: list[str], tmp_path: Path) -> None:
    settle(places)
    file_of(places[0]).rename(tmp_path / "elsewhere")
    file_of(places[0]).symlink_to(tmp_path / "elsewhere")
    assert str(file_of(places[0])) in refused(places).message


def test_half_written_identity_of_a_crash_is_no_identity(places: list[str]) -> None:
    Path(places[0], f"{identity.FILE_NAME}.{os.getpid()}.tmp").write_bytes(b"half")
    settle(places)
    assert os.listdir(places[0]) == [identity.FILE_NAME]

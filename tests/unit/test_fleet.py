"""The secret of a fleet: what it is made of, and from which files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvwarehouse import core, fleet
from kvwarehouse.errors import UsageError
from kvwarehouse.fleet import FleetSecret

DATA = bytes(range(32))


def secret_file(tmp_path: Path, data: bytes, mode: int = 0o600) -> str:
    file = tmp_path / "fleet-secret"
    file.write_bytes(data)
    file.chmod(mode)
    return str(file)


def test_secret_and_id_of_a_fleet_are_those_of_the_format(tmp_path: Path) -> None:
    """All hosts of a fleet, of whatever version, have to make the same of one file."""
    found = FleetSecret.read(secret_file(tmp_path, DATA))
    assert len(found.secret) == fleet.SECRET_BYTES == core.SECRET_BYTES
    digest = hashlib.blake2b(found.secret, digest_size=16).hexdigest()
    assert digest == "d5bdba97432b0e682e80965ce1403faf"
    assert found.fleet_id.hex() == "82b1b003e40bff232e333fed73930817"


def test_every_byte_of_the_file_counts(tmp_path: Path) -> None:
    datas = [DATA, DATA + b"\n", b"\n" + DATA, DATA[:-1] + b"\0", DATA * 2]
    made = [FleetSecret.read(secret_file(tmp_path, data)) for data in datas]
    assert len({one.secret for one in made}) == len({one.fleet_id for one in made}) == len(datas)


def test_short_file_is_refused_without_showing_it(tmp_path: Path) -> None:
    path = secret_file(tmp_path, b"hunter2-hunter2-hunter2-hunter2")
    with pytest.raises(UsageError, match=r"31 bytes.*openssl rand -hex 32") as caught:
        FleetSecret.read(path)
    assert caught.value.code == "bad_config"
    assert "hunter2" not in caught.value.message
    assert path in caught.value.message


@pytest.mark.parametrize("mode", [0o604, 0o620])
def test_file_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match=r"--fleet-secret .*chmod 600"):
        FleetSecret.read(secret_file(tmp_path, DATA, mode))


def test_text_of_a_fleet_secret_does_not_show_it() -> None:
    found = FleetSecret.derive(DATA)
    assert found.secret.hex() not in repr(found)
    assert repr(found.secret) not in repr(found)

"""The mover for devices over the contract model of kvikio: its files, its futures, its failures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.client.mover import HeldFile
from kvwarehouse.gpu.kvikio_mover import OPEN_FILES, KvikioMover
from kvwarehouse.testing.kvikio_model import KvikioModel


class Target:
    """Device memory, as far as kvikio looks at it; its bytes are here."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def take(self, data: bytes) -> None:
        self.data[:] = data

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (len(self.data),), "typestr": "|u1", "data": (1, False), "version": 3}


@pytest.fixture
def model() -> KvikioModel:
    return KvikioModel(Target.take)


def held(path: Path, number: int = 0) -> HeldFile:
    return HeldFile(str(path), -1, True, (1, number))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(3 * 4096))
    return path


def test_bytes_come_from_the_place_that_was_named(model: KvikioModel, file: Path) -> None:
    mover = KvikioMover(gds=False, library=model)
    targets = [Target(4096), Target(4096)]
    finished = [mover.start(held(file), at, t) for at, t in zip((8192, 0), targets, strict=True)]
    for each in finished:
        each()
    data = file.read_bytes()
    assert [bytes(t.data) for t in targets] == [data[8192:], data[:4096]]
    assert model.opened == 1
    mover.close()
    assert not model.open


@pytest.mark.parametrize(("gds", "mode"), [(True, "OFF"), (False, "ON")])
def test_neither_way_falls_back_to_the_other_unseen(
    model: KvikioModel, gds: bool, mode: str
) -> None:
    mover = KvikioMover(gds=gds, library=model)
    assert model.settings["compat_mode"] == mode
    assert ("GDS" in mover.name) == gds


def test_a_short_read_is_an_error(model: KvikioModel, file: Path) -> None:
    model.short_bytes = 1
    mover = KvikioMover(gds=True, library=model)
    finished = mover.start(held(file), 0, Target(4096))
    with pytest.raises(OSError, match="4095 of 4096"):
        finished()


def test_open_files_are_bounded_and_none_is_closed_while_it_is_read(
    model: KvikioModel, file: Path
) -> None:
    mover = KvikioMover(gds=True, library=model)
    under_way = [mover.start(held(file, n), 0, Target(4096)) for n in range(OPEN_FILES + 5)]
    assert len(model.open) == OPEN_FILES + 5
    for finished in under_way:
        finished()
    mover.start(held(file, 1000), 0, Target(4096))()
    assert len(model.open) == OPEN_FILES
    opened = model.opened
    mover.start(held(file, 1000), 0, Target(4096))()
    assert model.opened == opened
    mover.close()
    assert not model.open


def test_a_failed_transfer_does_not_keep_its_file(model: KvikioModel, file: Path) -> None:
    mover = KvikioMover(gds=True, library=model)
    model.error = RuntimeError("POSIX error on pread: EOF")
    for number in range(OPEN_FILES):
        with pytest.raises(RuntimeError):
            mover.start(held(file, number), 0, Target(4096))()
    model.error = None
    mover.start(held(file, 1000), 0, Target(4096))()
    assert len(model.open) == OPEN_FILES

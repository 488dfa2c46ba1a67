"""The file reader for devices over the contract model of kvikio: its files, reads and failures."""

from __future__ import annotations

import ctypes
import os
from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvwarehouse.gpu.file_reader import OPEN_FILES, HeldFile, KvikioReader
from testkit.gpu_paths import KvikioModel


class Target:
    """Device memory, as far as kvikio looks at it: its bytes are at an address."""

    kept: ClassVar[list[Target]] = []  # until what writes to them has ended

    def __init__(self, size_bytes: int) -> None:
        self.data = np.zeros(size_bytes, np.uint8)
        self.kept.append(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self.data.ctypes.data
        return {"shape": self.data.shape, "typestr": "|u1", "data": (address, False), "version": 3}


def take(part: Any, data: bytes) -> None:
    ctypes.memmove(part.address, data, part.size_bytes)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever driver this process has: targets are in the host's memory."""
    monkeypatch.setattr(
        "kvwarehouse.gpu.file_reader.relaxed_capture_mode", lambda *_: nullcontext()
    )


@pytest.fixture
def model() -> KvikioModel:
    return KvikioModel(take)


def held(path: Path, number: int = 0) -> HeldFile:
    return HeldFile(str(path), -1, True, (1, number))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(3 * 4096))
    return path


def test_bytes_come_from_the_place_that_was_named(model: KvikioModel, file: Path) -> None:
    file_reader = KvikioReader(gds=False, library=model)
    targets = [Target(4096), Target(4096)]
    finished = [
        file_reader.start(held(file), at, t) for at, t in zip((8192, 0), targets, strict=True)
    ]
    for each in finished:
        assert each(inf)
    data = file.read_bytes()
    assert [t.data.tobytes() for t in targets] == [data[8192:], data[:4096]]
    assert model.opened == 1
    file_reader.close()
    assert not model.open


@pytest.mark.parametrize(("gds", "mode"), [(True, "OFF"), (False, "ON")])
def test_neither_way_falls_back_to_the_other_unseen(
    model: KvikioModel, gds: bool, mode: str
) -> None:
    file_reader = KvikioReader(gds=gds, library=model)
    assert model.settings["compat_mode"] == mode
    assert ("GDS" in file_reader.name) == gds


def test_a_short_read_is_an_error(model: KvikioModel, file: Path) -> None:
    model.short_bytes = 1
    file_reader = KvikioReader(gds=True, library=model)
    finished = file_reader.start(held(file), 0, Target(4096))
    with pytest.raises(OSError, match="4095 of 4096"):
        finished(inf)


def test_open_files_are_bounded_and_none_is_closed_while_it_is_read(
    model: KvikioModel, file: Path
) -> None:
    file_reader = KvikioReader(gds=True, library=model)
    under_way = [file_reader.start(held(file, n), 0, Target(4096)) for n in range(OPEN_FILES + 5)]
    for finished in under_way:
        assert finished(inf)
    file_reader.start(held(file, 1000), 0, Target(4096))(inf)
    assert len(model.open) == OPEN_FILES
    opened = model.opened
    file_reader.start(held(file, 1000), 0, Target(4096))(inf)
    assert model.opened == opened
    file_reader.close()
    assert not model.open


def test_a_failed_transfer_does_not_keep_its_file(model: KvikioModel, file: Path) -> None:
    file_reader = KvikioReader(gds=True, library=model)
    model.error = RuntimeError("POSIX error on pread: EOF")
    for number in range(OPEN_FILES):
        with pytest.raises(RuntimeError):
            file_reader.start(held(file, number), 0, Target(4096))(inf)
    model.error = None
    file_reader.start(held(file, 1000), 0, Target(4096))(inf)
    assert len(model.open) == OPEN_FILES


def test_large_transfer_is_cut_to_parts_and_waits_for_all_of_them_where_one_fails(
    model: KvikioModel, tmp_path: Path
) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(9 << 20))
    file_reader = KvikioReader(gds=True, library=model)
    target = Target(9 << 20)
    assert file_reader.start(held(path), 0, target)(inf)
    assert model.reads == 3
    assert target.data.tobytes() == path.read_bytes()
    taken: list[int] = []

    def fail_first(part: Any, data: bytes) -> None:
        taken.append(part.size_bytes)
        if len(taken) == 1:
            raise ValueError("cuFile: invalid argument")

    failing = KvikioModel(fail_first)
    finished = KvikioReader(gds=True, library=failing).start(held(path), 0, target)
    with pytest.raises(ValueError, match="invalid argument"):
        finished(inf)
    assert sorted(taken) == [1 << 20, 4 << 20, 4 << 20]


def test_device_that_does_not_answer_holds_nobody(model: KvikioModel, file: Path) -> None:
    file_reader = KvikioReader(gds=True, library=model)
    model.answers.clear()
    target = Target(4096)
    finished = file_reader.start(held(file), 0, target)
    assert not finished(0.0)
    assert not finished(0.02)
    model.answers.set()
    assert finished(inf)
    assert target.data.tobytes() == file.read_bytes()[:4096]
    file_reader.close()

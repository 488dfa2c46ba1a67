"""cuFile has a fallback of its own beside kvikio's, and reads through host memory by it without a
word. A machine without nvidia-fs was said to have GPUDirect Storage, and its rate was taken for
that of the lane."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwarehouse.gpu import direct_cufile, path_benchmark_child, probe
from kvwarehouse.gpu.driver import DeviceBytes
from testkit.gpu_paths import KvikioModel


class HostDriver:
    """The CUDA driver, as far as a probe uses it; its memory is the host's."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def use(self, number: int) -> None:
        assert number == 0

    def memory(self, size_bytes: int) -> DeviceBytes:
        self.kept.append(ctypes.create_string_buffer(size_bytes))
        return DeviceBytes(ctypes.addressof(self.kept[-1]), size_bytes)


def take(part: Any, data: bytes) -> None:
    ctypes.memmove(part.address, data, len(data))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a cuFile without a straight way in place: one that `obeys` fails where its fallback is
    forbidden, else reads by it."""

    def played(*, obeys: bool, nvidia_fs: bool = False) -> None:
        model = KvikioModel(take)
        read = model.CuFile

        def opened(path: str, flags: str) -> Any:
            if obeys and os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false":
                raise RuntimeError("5027: nvidia-fs is not loaded")
            return read(path, flags)

        said = {"allow_compat_mode": not obeys, "is_gds_available": nvidia_fs}
        monkeypatch.setattr(model, "CuFile", opened)
        monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "true")
        monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "false")
        monkeypatch.setitem(sys.modules, "kvikio", model)
        monkeypatch.setitem(sys.modules, "kvikio.defaults", model.defaults)
        driver = SimpleNamespace(get=said.__getitem__)
        monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)
        monkeypatch.setattr(probe, "Driver", HostDriver)
        monkeypatch.setattr(
            "kvwarehouse.gpu.file_reader.relaxed_capture_mode", lambda *_: nullcontext()
        )
        monkeypatch.setattr(direct_cufile, "_MODULES", Path(__file__))

    return played


def test_probe_says_no_where_cufile_only_falls_back(play: Any) -> None:
    play(obeys=True)
    with pytest.raises(RuntimeError, match="5027"):
        probe._gds()


def test_probe_says_no_where_the_fallback_cannot_be_forbidden(play: Any) -> None:
    play(obeys=False)
    with pytest.raises(RuntimeError, match="allow_compat_mode"):
        probe._gds()


def test_probe_says_yes_where_nvidia_fs_is_loaded(play: Any) -> None:
    play(obeys=False, nvidia_fs=True)
    assert probe._gds() == {"gds": True}


def test_where_opening_would_not_end_nothing_is_opened(
    play: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """cuFile 1.19 reads /proc/modules in a loop: each look at such a machine took half a minute,
    and each rank of an engine looks."""
    play(obeys=False, nvidia_fs=True)
    monkeypatch.setattr(direct_cufile, "_MODULES", tmp_path / "modules")
    with pytest.raises(RuntimeError, match="without an end"):
        probe._gds()


@pytest.mark.parametrize("obeys", [True, False])
def test_rate_of_a_fallback_is_none_of_gds(play: Any, tmp_path: Path, obeys: bool) -> None:
    play(obeys=obeys)
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(4096))
    pieces = [path_benchmark_child.Piece(str(path), 0, 4096)]
    assert path_benchmark_child._by_kvikio(pieces, HostDriver(), gds=False) > 0  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"nvidia-fs is not loaded"):
        path_benchmark_child._by_kvikio(pieces, HostDriver(), gds=True)  # type: ignore[arg-type]


def test_newer_cufile_is_told_by_its_call(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.20 does not know the variable."""
    play(obeys=True)
    told: list[tuple[int, bool]] = []

    def set_parameter(*given: Any) -> None:
        told.append(given)

    library = SimpleNamespace(cuFileSetParameterBool=set_parameter)
    monkeypatch.setattr(direct_cufile.ctypes, "CDLL", lambda name, mode: library)
    direct_cufile.forbid_fallback()
    assert told == [(1, False)]

"""`kvwarehouse bench nvme` at sizes that take no time: what it prints, with fio and without."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.cli.bench.fio import Disk
from kvwarehouse.cli.main import main
from kvwarehouse.errors import StorageError

pytest.importorskip("kvwarehouse.engine._native", reason="the core is not built")

_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
_SIZES = ("256 KiB", "1 MiB", "2 MiB", "8 MiB")


def _bench(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    asked = ["bench", "nvme", "--nvme-dir", str(folder), "--rounds", "3", "--json", *arguments]
    assert main(asked) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not list(folder.iterdir())  # it cleans up after itself
    return {each["name"]: each for each in shown["figures"]}


def _names(size: str, *, fio: bool) -> list[str]:
    rates = ("write to nvme, durable", "load from nvme")
    before = ("", "processor, ") if fio else ("",)
    compared = [f"{word}{rate}, {size}" for rate in rates for word in before]
    return [*compared, f"first page of a load, {size}"]


@_fio
def test_bench_of_nvme_compares_rates_processor_and_first_page_with_fio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = _bench(tmp_path, capsys, "--bytes", "8MiB", "--page", "1MiB")
    assert list(figures) == _names("1 MiB", fio=True)
    for figure in figures.values():
        if figure["name"].startswith("processor"):  # so little may be no time at all
            assert figure["value"] >= 0
            assert figure["limit"] >= 0
        else:
            low, high = figure["ratio_spread"]
            assert figure["value"] > 0
            assert figure["limit"] > 0
            assert 0 < low <= figure["ratio"] <= high
    limit_name = figures["load from nvme, 1 MiB"]["limit_name"]
    assert limit_name.endswith(("depth 8, io_uring", "depth 8, libaio"))


def test_bench_of_nvme_measures_each_size_and_says_so_where_fio_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "measurable", staticmethod(lambda: False))
    figures = _bench(tmp_path, capsys, "--bytes", "8MiB")
    assert list(figures) == [name for size in _SIZES for name in _names(size, fio=False)]
    for size in _SIZES:
        load = figures[f"load from nvme, {size}"]
        assert (load["limit"], load["ratio"]) == (None, None)
        assert load["limit_name"] == "fio is not installed"
        assert load["value"] > 0


@_fio
def test_pass_of_fio_is_over_the_whole_file_and_what_it_says_of_a_failure_is_told(
    tmp_path: Path,
) -> None:
    disk = Disk(str(tmp_path), 4 << 20, 1 << 20, "pread")
    for direction in ("write", "read"):
        done = disk.run(direction)
        assert done.seconds > 0
        assert done.processor_s >= 0
    assert os.stat(tmp_path / "fio.bin").st_size == 4 << 20
    with pytest.raises(StorageError, match="fio failed"):
        Disk(str(tmp_path / "fio.bin"), 4 << 20, 1 << 20, "pread").run("write")

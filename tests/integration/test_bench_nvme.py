"""`kvwarehouse bench nvme` at sizes that take no time: what it prints, with fio and without."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvwarehouse.cli.main import main
from kvwarehouse.client import Client, connect
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse.errors import StorageError
from kvwarehouse_bench.micro import nvme
from kvwarehouse_bench.micro.fio import Disk, Pass
from kvwarehouse_bench.micro.options import Bench, Options, noise, open_bench, prompt

pytest.importorskip("kvwarehouse.core._native", reason="the core is not built")

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
def test_writes_of_fio_take_one_part_of_a_full_file_after_the_other(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path), 4 << 20, 1 << 20, 1 << 18, "pread")
    disk.fill()
    file = tmp_path / "fio.bin"
    assert file.stat().st_size == 4 << 20
    full = file.read_bytes()
    for part in (0, 1, 2, 3, 0):
        file.write_bytes(bytes(4 << 20))
        done = disk.run("write")
        assert done.seconds > 0
        assert done.processor_s >= 0
        now, begin, end = file.read_bytes(), part << 20, (part + 1) << 20
        assert any(now[begin:end])
        assert not any(now[:begin])
        assert not any(now[end:])
    assert all(any(full[begin : begin + (1 << 20)]) for begin in range(0, 4 << 20, 1 << 20))


@_fio
def test_reads_of_fio_write_nothing_and_find_their_memory_there(tmp_path: Path) -> None:
    blocks = 8 * (1 << 20)
    disk = Disk(str(tmp_path), 32 << 20, 16 << 20, 1 << 20, "pread")
    disk.fill()
    before = (tmp_path / "fio.bin").read_bytes()
    done = disk.run("read")
    assert done.seconds > 0
    job = disk.job("read")
    # Eight times the same part: the processor's time of one is little beside fio's clock.
    assert (job["read"]["io_bytes"], job["write"]["io_bytes"]) == (8 * (16 << 20), 0)
    assert job["minf"] < blocks / 4096 / 4  # of the memory that it reads to
    assert (tmp_path / "fio.bin").read_bytes() == before


@pytest.mark.parametrize(("direction", "passes"), [("read", 8), ("write", 1)])
def test_a_pass_of_fio_is_its_share_of_the_job(
    monkeypatch: pytest.MonkeyPatch, direction: str, passes: int
) -> None:
    said = {"job_runtime": 1000, "read": {"runtime": 800}, "usr_cpu": 0.4, "sys_cpu": 1.2}
    monkeypatch.setattr(Disk, "job", lambda self, direction: said)
    done = Disk("/nowhere", 4 << 20, 1 << 20, 1 << 18, "pread").run(direction)
    # What a write's sync takes is in the job's time and not in the write's.
    assert done.seconds == pytest.approx((0.8 if direction == "read" else 1.0) / passes)
    assert done.processor_s == pytest.approx(0.016 / passes)


@_fio
def test_what_fio_says_of_a_failure_is_told(tmp_path: Path) -> None:
    (tmp_path / "fio.bin").write_bytes(b"no folder")
    with pytest.raises(StorageError, match="fio failed"):
        Disk(str(tmp_path / "fio.bin"), 4 << 20, 1 << 20, 1 << 18, "pread").run("write")


@_fio
def test_processor_that_clearing_and_evicting_take_between_rounds_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0

    def taking(call: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*arguments: Any) -> Any:
            nonlocal seconds
            seconds += 100.0
            return call(*arguments)

        return taken

    monkeypatch.setattr(Client, "evict", taking(Client.evict))
    monkeypatch.setattr(Client, "clear", taking(Client.clear))
    monkeypatch.setattr(nvme, "core_s", lambda pid: seconds)
    figures = _bench(tmp_path, capsys, "--bytes", "2MiB", "--page", "256KiB")
    assert seconds > 0
    for name in ("write to nvme, durable", "load from nvme"):
        assert figures[f"processor, {name}, 256 KiB"]["value"] == 0


def test_digests_are_taken_off_as_the_core_counts_them_during_the_call() -> None:
    counted = [10.0, 10.25]

    class Counting:
        def status(self) -> dict[str, Any]:
            return {"core": {"tiers": {"nvme": {"read_digest_s": counted.pop(0)}}}}

    def call() -> Pass:
        assert counted == [10.25]
        return Pass(2.0, 1.0)

    options = Options(rounds=3, page_bytes=1 << 20, pages=1, nvme_dir=None)
    bench = Bench(options, cast(Client, Counting()), None, None)
    assert nvme.without_digests(bench, call) == Pass(2.0, 0.75)


def test_core_counts_digests_of_loads_from_nvme_and_of_nothing_else(tmp_path: Path) -> None:
    settings = {"dram": "64MiB", "nvme_dir": str(tmp_path), "nvme_capacity": "64MiB"}
    with PrivateDaemon(settings) as daemon, connect(daemon.address) as client:

        def digested_s() -> float:
            counted: float = client.status()["core"]["tiers"]["nvme"]["read_digest_s"]
            return counted

        ns = open_bench(client, 256 << 10)
        tokens, pages = prompt(16, seed=0), noise(16, 256 << 10)
        out = np.ones_like(pages)
        ns.store(tokens, pages)
        client.flush(60.0)
        assert ns.load(tokens, out) == 16
        assert digested_s() == 0
        client.evict(ns.space, 16, "dram")
        begin_s = time.monotonic()
        assert ns.load(tokens, out, timeout_s=60.0) == 16
        # Of each page no longer than the load was.
        assert 0 < digested_s() <= 16 * (time.monotonic() - begin_s)

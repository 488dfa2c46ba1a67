"""Which way NVMe reaches a GPU: what was measured decides, is remembered, and is said."""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.gpu.driver import DeviceBytes
from kvwarehouse.gpu.machine import Machine
from kvwarehouse.gpu.path_benchmark import LEAST_BYTES, LoadPath, Rates, disk_rate, measure, written
from kvwarehouse.gpu.path_benchmark_child import _by_host, pieces_of, rate_of
from kvwarehouse.gpu.path_selection import Choice, judge, last_selection, select_path
from kvwarehouse_bench.harness.eventually import longer_bounds

GPU = Machine(cuda="13.0", devices=["H100"], kvikio="26.10", gds=True)
G, C, D = LoadPath.GDS, LoadPath.COMPAT, LoadPath.DRAM


@pytest.mark.parametrize(
    ("rates", "path"),
    [
        ({G: 6e9, C: 4e9, D: 5e9}, G),
        ({G: 3e9, C: 6e9, D: 5e9}, C),
        ({G: 3e9, C: 2e9, D: 5e9}, D),
        ({G: 5.1e9, D: 5e9}, D),  # hardly faster: DRAM also keeps it for others
        ({C: 1e9}, C),
        ({}, D),
    ],
)
def test_the_fastest_measured_way_is_taken(rates: dict[LoadPath, float], path: LoadPath) -> None:
    assert judge(GPU, Rates(rates, {}, 1)).path is path


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    def never(*given: Any) -> Rates:
        raise AssertionError(given)

    choice = select_path(tmp_path, memory=tmp_path / "memory", probe=Machine, measure=never)
    assert choice.path is D
    assert "no GPU" in choice.describe()[-1]


class Measuring:
    def __init__(self, rates: Rates) -> None:
        self.rates, self.asked = rates, []  # type: ignore[var-annotated]

    def __call__(self, folder: Path, paths: list[LoadPath], ordinal: int) -> Rates:
        self.asked.append(paths)
        return self.rates


def chosen(folder: Path, measuring: Any, machine: Machine = GPU, **more: Any) -> Choice:
    return select_path(
        folder, memory=folder / "cache" / "m", probe=lambda: machine, measure=measuring, **more
    )


def test_a_measurement_is_remembered_for_the_same_machine_alone(tmp_path: Path) -> None:
    measuring = Measuring(Rates({G: 6e9, D: 5e9}, {C: "cuFile said no"}, 1 << 30))
    first = chosen(tmp_path, measuring)
    again = chosen(tmp_path, measuring)
    assert not first.remembered
    assert again.remembered
    assert again.path is G
    assert again.rates == first.rates
    assert len(measuring.asked) == 1
    other = Machine(cuda="13.1", devices=["H100"], kvikio="26.10", gds=True)
    assert not chosen(tmp_path, measuring, other).remembered
    assert not chosen(tmp_path, measuring, GPU, again=True).remembered
    told = chosen(tmp_path, measuring).describe()
    assert "gds: 6.00 GB/s" in told
    assert "compat: not measured (cuFile said no)" in told
    assert told[-1].endswith("(remembered)")


def test_devices_and_wishes_are_remembered_side_by_side_and_bounded(tmp_path: Path) -> None:
    measuring = Measuring(Rates({G: 6e9, D: 5e9}, {}, 1 << 30))
    for ordinal in range(20):
        assert not chosen(tmp_path, measuring, ordinal=ordinal).remembered
    assert chosen(tmp_path, measuring, ordinal=19).remembered
    assert not chosen(tmp_path, measuring, ordinal=19, among=(G, D)).remembered
    assert set(measuring.asked[-1]) == {G, D}
    assert chosen(tmp_path, measuring, ordinal=19).remembered
    assert not chosen(tmp_path, measuring, ordinal=0).remembered, "the oldest made room"


def test_path_that_could_not_be_measured_is_tried_again_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(tmp_path, Measuring(Rates({D: 5e9}, {G: "cuMemAlloc: out of memory"}, 1 << 30)))
    better = Measuring(Rates({D: 5e9, G: 9e9}, {}, 1 << 30))
    assert chosen(tmp_path, better).path is D
    monkeypatch.setattr("kvwarehouse.gpu.path_selection._PROBLEMS_S", 0.0)
    assert chosen(tmp_path, better).path is G
    assert chosen(tmp_path, better).remembered


def test_measurement_without_the_daemons_way_is_not_remembered(tmp_path: Path) -> None:
    nothing = Measuring(Rates({}, dict.fromkeys(LoadPath, "cuMemAlloc: out of memory"), 1 << 30))
    assert chosen(tmp_path, nothing).path is D
    assert chosen(tmp_path, Measuring(Rates({D: 5e9, G: 9e9}, {}, 1 << 30))).path is G


def test_what_could_not_be_measured_is_tried_again_next_time(tmp_path: Path) -> None:
    measuring = Measuring(Rates({}, {D: "too little is stored"}, 0))
    assert chosen(tmp_path, measuring).path is D
    assert "too little is stored" in chosen(tmp_path, measuring).why
    assert len(measuring.asked) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"x": 1}'])
def test_a_damaged_memory_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    measuring = Measuring(Rates({D: 5e9}, {}, 1 << 30))
    chosen(tmp_path, measuring)
    (tmp_path / "cache" / "m").write_bytes(content)
    assert not chosen(tmp_path, measuring).remembered


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    measuring = Measuring(Rates({D: 5e9}, {}, 1 << 30))
    assert chosen(tmp_path, measuring).path is D


@pytest.mark.parametrize(
    ("machine", "paths"),
    [
        (GPU, {G, C, D}),
        # The probe's own file may be on a file system without GPUDirect Storage.
        (Machine(cuda="13.0", devices=["x"], kvikio="1", gds_error="tmpfs"), {G, C, D}),
        # It spins where the probe did, whatever the file.
        (Machine(cuda="13.0", devices=["x"], kvikio="1", problem="it was killed"), {C, D}),
        (Machine(cuda="13.0", devices=["x"]), {D}),
    ],
)
def test_only_ways_that_can_work_are_measured(
    tmp_path: Path, machine: Machine, paths: set[LoadPath]
) -> None:
    measuring = Measuring(Rates())
    chosen(tmp_path, measuring, machine)
    assert set(measuring.asked[0]) == paths


def test_processes_that_begin_together_measure_once(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "m"
    inside, go_on = threading.Event(), threading.Event()

    def slow(folder: Path, paths: list[LoadPath], ordinal: int) -> Rates:
        inside.set()
        assert go_on.wait(60)
        return Rates({G: 6e9, D: 3e9}, {}, 1 << 30)

    def never(folder: Path, paths: list[LoadPath], ordinal: int) -> Rates:
        raise AssertionError("it was measured beside the other")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(chosen, tmp_path, slow)
        assert inside.wait(60)
        second = threads.submit(chosen, tmp_path, never)
        with pytest.raises(TimeoutError):
            second.result(0.5)
        go_on.set()
        assert not first.result(60).remembered
        assert second.result(60).remembered
    assert last_selection(file) == "gds: the fastest that was measured"


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"\xff", b'{"x": 1}', b'{"x": {}}'])
def test_without_a_choice_there_are_no_words(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "m").write_bytes(content)
    assert last_selection(tmp_path / "m") == ""


def segment(folder: Path, number: int, data: list[tuple[int, int]], size_bytes: int) -> Path:
    path = folder / f"{number:08}.seg"
    with path.open("wb") as file:
        os.truncate(file.fileno(), size_bytes)
        for offset, size in data:
            os.pwrite(file.fileno(), os.urandom(size), offset)
    return path


def test_only_bytes_that_were_written_are_measured_with(tmp_path: Path) -> None:
    mib = 1 << 20
    first = segment(tmp_path, 0, [(0, mib), (8 * mib, 2 * mib)], 16 * mib)
    segment(tmp_path, 1, [], 16 * mib)
    last = segment(tmp_path, 2, [(4 * mib, mib)], 16 * mib)
    assert list(written(tmp_path)) == [
        (first, 0, mib),
        (first, 8 * mib, 2 * mib),
        (last, 4 * mib, mib),
    ]
    assert sum(size for _, _, size in written(tmp_path, 2 * mib)) == 2 * mib


def test_too_little_to_measure_with_is_said(tmp_path: Path) -> None:
    segment(tmp_path, 0, [(0, 1 << 20)], 1 << 24)
    rates = measure(tmp_path, [D])
    assert rates.measured_bytes == 0
    assert str(LEAST_BYTES) in rates.problems[D]


def test_each_way_is_measured_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment(tmp_path, 0, [(0, LEAST_BYTES)], LEAST_BYTES)
    played = tmp_path / "played_rates.py"
    played.write_text(
        "import sys, os\n"
        "from kvwarehouse.gpu.probe_process import report_steps\n"
        "def rate():\n"
        "    if sys.argv[1] == 'gds':\n"
        "        while True: pass\n"
        "    assert sys.argv[2] == '5'\n"
        "    if sys.argv[1] == 'compat': raise RuntimeError('no cuFile')\n"
        "    return {'bytes_per_s': sum(int(a.split(':')[1]) for a in sys.argv[3:])}\n"
        "report_steps({'rate': rate})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for bound_s in longer_bounds(1.0):
        rates = measure(tmp_path, ordinal=5, timeout_s=bound_s, module="played_rates")
        assert "was killed" in rates.problems[G]
        if D in rates.bytes_per_s and "was killed" not in rates.problems[C]:
            break
    assert rates.bytes_per_s == {D: LEAST_BYTES}
    assert "no cuFile" in rates.problems[C]


def test_pieces_cover_what_was_named_once() -> None:
    mib = 1 << 20
    cut = pieces_of([f"4096:{9 * mib}:/a:b", f"0:{mib}:/c"])
    assert [tuple(each) for each in cut] == [
        ("/a:b", 4096, 4 * mib),
        ("/a:b", 4096 + 4 * mib, 4 * mib),
        ("/a:b", 4096 + 8 * mib, mib),
        ("/c", 0, mib),
    ]


def test_a_rate_counts_every_byte_once_a_round(tmp_path: Path) -> None:
    path = segment(tmp_path, 0, [(0, 1 << 20)], 1 << 20)
    pieces = pieces_of([f"0:{1 << 20}:{path}"])
    rounds: list[int] = []
    assert rate_of(pieces, lambda: rounds.append(1)) > 0
    assert len(rounds) == 3


class SlowCopies:
    """A driver whose first copy ends when others have been made beside it."""

    def __init__(self, others: int) -> None:
        self._lock = threading.Lock()
        self._left = others
        self._made = threading.Event()
        self._entered = threading.local()
        self.first = True

    def enter(self) -> None:
        self._entered.done = True

    def memory(self, size_bytes: int) -> DeviceBytes:
        return DeviceBytes(0, size_bytes)

    def pinned(self, size_bytes: int) -> Any:
        return mmap.mmap(-1, size_bytes)

    def to_device(self, memory: Any, source: Any, size_bytes: int) -> None:
        assert self._entered.done, "this thread has no context"
        with self._lock:
            first, self.first = self.first, False
            self._left -= not first
            if self._left == 0:
                self._made.set()
        if first:
            assert self._made.wait(60.0), "the next reads wait for the copies of those before"


def test_reads_go_on_beside_copies_in_the_path_of_dram(tmp_path: Path) -> None:
    """They took turns, so that the path was measured slower than it is and GDS was chosen."""
    path = segment(tmp_path, 0, [(0, 80 << 20)], 80 << 20)
    pieces = pieces_of([f"0:{80 << 20}:{path}"])
    assert len(pieces) == 20
    assert _by_host(pieces, SlowCopies(others=19)) > 0  # type: ignore[arg-type]


def test_the_disk_itself_is_measured_without_a_device(tmp_path: Path) -> None:
    assert disk_rate(tmp_path) == 0
    segment(tmp_path, 0, [(0, 9 << 20)], 16 << 20)
    assert disk_rate(tmp_path, 60.0) > 0

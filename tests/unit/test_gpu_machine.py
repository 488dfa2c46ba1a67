"""What is said of a machine's GPUs, whatever the vendor's libraries do to the process that asks
them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.gpu.machine import Machine, probe_machine
from kvwarehouse.gpu.probe_process import run_probe
from kvwarehouse_bench.harness.eventually import eventually

TELL = "from kvwarehouse.gpu.probe_process import report_steps\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a module of these lines, for children."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(*lines: str) -> str:
        (tmp_path / "played.py").write_text(TELL + "\n".join(lines) + "\n")
        return "played"

    return make


def test_a_child_that_spins_is_killed_and_what_it_said_before_counts(module: Any) -> None:
    spins = module(
        "def first(): return {'cuda': '13.0', 'devices': ['H100']}",
        "def second():",
        "    import signal",
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "    while True: pass",
        "report_steps({'driver': first, 'gds': second})",
    )
    for limit_s in (2.0, 8.0, 32.0):  # on a busy machine it takes longer to begin
        machine = probe_machine(limit_s, module=spins)
        if "'gds'" in machine.problem:
            break
    assert machine.cuda == "13.0"
    assert machine.has_device
    assert not machine.gds
    assert "'gds'" in machine.problem
    assert "was killed" in machine.problem


def test_a_child_that_crashes_says_in_which_step(module: Any) -> None:
    crashes = module(
        "def first(): return {'cuda': '13.0'}",
        "def second():",
        "    import os",
        "    os.abort()",
        "report_steps({'driver': first, 'kvikio': second})",
    )
    machine = probe_machine(30.0, module=crashes)
    assert machine.cuda == "13.0"
    assert "'kvikio'" in machine.problem
    assert "status -6" in machine.problem


@pytest.mark.parametrize(
    ("shares", "words"),
    [([], ""), ([False, True], "serve --hbm SIZE --device 1"), ([False], "no HBM tier")],
)
def test_an_hbm_tier_is_offered_where_a_device_can_share_its_memory(
    shares: list[bool], words: str
) -> None:
    machine = Machine(cuda="13.0", devices=["H100"] * max(1, len(shares)), shares=shares)
    assert words in machine.describe()[0]
    assert ("HBM" in machine.describe()[0]) == bool(words)


def test_what_libraries_print_is_no_answer(module: Any) -> None:
    noisy = module(
        "def first():",
        "    import os",
        '    print(\'{"kvikio": "99"}\', flush=True)',
        '    os.write(1, b\'{"kvikio": "98"}\\n\')',
        "    return {'cuda': '13.0'}",
        "report_steps({'driver': first})",
    )
    machine = probe_machine(30.0, module=noisy)
    assert (machine.cuda, machine.kvikio, machine.gds) == ("13.0", "", False)


def test_a_step_that_raises_is_a_finding(module: Any) -> None:
    raising = module(
        "def first(): raise OSError('libcuda.so.1: cannot open')",
        "def second(): return {'kvikio': '26.10'}",
        "report_steps({'driver': first, 'kvikio': second})",
    )
    machine = probe_machine(30.0, module=raising)
    assert "libcuda.so.1" in machine.driver_error
    assert machine.kvikio == "26.10"
    assert machine.problem == ""


def test_a_child_leaves_nothing_in_the_callers_folder(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    run_probe(module("open('cufile.log', 'w').close()"), [], 30.0)
    assert list(here.iterdir()) == []


def test_a_look_at_this_machine_ends_and_says_what_is_used() -> None:
    machine = probe_machine(60.0)
    words = machine.describe()
    assert all(words)
    assert ("no GPU" in words[0]) == (not machine.cuda)


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (Machine(driver_error="OSError: no libcuda"), "there is no GPU"),
        (Machine(cuda="13.0", devices=["H100"]), "kvikio is missing"),
        (Machine(cuda="13.0", devices=["H100"], kvikio="26.10", gds=True), "Storage works"),
        (
            Machine(cuda="13.0", devices=["H100"], kvikio="26.10", gds_error="error 5027"),
            "no GPUDirect Storage (error 5027)",
        ),
        (
            Machine(cuda="13.0", devices=["H100"], kvikio="26.10", problem="the probe was killed"),
            "no GPUDirect Storage (the probe was killed)",
        ),
    ],
)
def test_words_say_what_fell_back_to_what_and_why(machine: Machine, told: str) -> None:
    assert told in machine.describe()[-1]


def test_package_asks_for_the_native_core_only_when_pages_move() -> None:
    """A child that probes begins with it, and so does the doctor of an installation that has no
    core."""
    without = (
        "import sys\n"
        "sys.modules['kvwarehouse.core._native'] = None\n"
        "import kvwarehouse.gpu\n"
        "assert 'kvwarehouse.core' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", without], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_child_ends_by_itself_where_the_process_that_asked_is_gone(tmp_path: Path) -> None:
    """As a thread's does that the interpreter's end stops."""
    pid_file = tmp_path / "pid"
    (tmp_path / "spinning.py").write_text(
        "import os, sys\n"
        "from kvwarehouse.gpu.probe_process import report_steps\n"
        "def spin():\n"
        f"    open({str(pid_file)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"    os.replace({str(pid_file)!r} + '.new', {str(pid_file)!r})\n"  # whole, or not there
        "    while True: pass\n"
        "report_steps({'spin': spin})\n"
    )
    asking = (
        "import os, threading, time\n"
        "from kvwarehouse.gpu.probe_process import run_probe\n"
        "def ask():\n"
        "    for limit_s in (2.0, 8.0, 32.0):\n"  # on a busy machine it takes longer to begin
        "        run_probe('spinning', [], limit_s)\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        f"while not os.path.exists({str(pid_file)!r}):\n"
        "    time.sleep(0.01)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", asking], env=environment, check=True, timeout=60)
    pid = int(pid_file.read_text())
    eventually(lambda: not Path(f"/proc/{pid}/stat").exists() or _is_zombie(pid), "it ended")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

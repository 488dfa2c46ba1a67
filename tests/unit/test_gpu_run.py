"""scripts/gpu_run.sh over a tree whose steps are pretended: what runs after what failed, and what
is left to bring back. The steps themselves need a GPU machine."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvwarehouse_bench.harness.eventually import eventually

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_run.sh"

MAKEFILE = """\
setup-gpu:
\t@echo set up; $(SETUP)
test-gpu:
\t@echo "= 3 $(PASSED) in 1.00s ="; $(TESTS)
"""
PASSED = "= 3 passed, 1 skipped in 1.00s ="
FACTS = "import os, sys\nprint('FACT', flush=True)\nsys.exit(os.system(os.environ['FACTS']) >> 8)\n"
BENCH = """\
#!/bin/sh
echo "$@" >>asked
echo "$3: $OUTCOME"; echo figures
mkdir -p build/bench/gpu; echo "$3" >"build/bench/gpu/$3.json"
eval "$BENCH"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "kvwarehouse"
    for name, text in {
        "scripts/gpu_run.sh": SCRIPT.read_text("utf-8"),
        "Makefile": MAKEFILE,
        "bench/gpu_facts.py": FACTS,
        ".venv-gpu/bin/python": BENCH,
        "docs/gpu.md": "written",
        # In the way of this machine's own, if it has them.
        "path/nvcc": "#!/bin/sh\nexit 1\n",
        "path/nvidia-smi": "#!/bin/sh\nexit 9\n",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
        (tree / name).chmod(0o755)
    return tree


def start(tree: Path, **environment: str) -> subprocess.Popen[str]:
    """From the folder above, as a person would."""
    pretended = dict.fromkeys(("SETUP", "TESTS", "FACTS", "BENCH"), "true")
    pretended |= {"PASSED": "passed, 1 skipped", "OUTCOME": "52.8 GB/s"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    path = f"{tree / 'path'}:{kept['PATH']}"
    return subprocess.Popen(
        [tree / "scripts" / "gpu_run.sh", "results"],
        cwd=tree.parent,
        env=kept | pretended | {"PATH": path, "DIR": str(tree / "disk")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(tree: Path, **environment: str) -> tuple[int, str, dict[str, tuple[str, str]]]:
    """Its status, what it said, and of each step in the table: the state, and what it said last."""
    process = start(tree, **environment)
    said, _ = process.communicate()
    return process.returncode, said, table(tree)


def table(tree: Path) -> dict[str, tuple[str, str]]:
    lines = (tree.parent / "results" / "steps.txt").read_text("utf-8").splitlines()
    rows = [line.split(maxsplit=4) for line in lines]
    return {name: (state, "".join(told)) for name, state, _seconds, _s, *told in rows}


def states(rows: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {name: state for name, (state, _told) in rows.items()}


def test_every_step_leaves_its_log_and_what_it_said(tree: Path) -> None:
    status, said, rows = run(tree, PARTS="hbm,nvme", LENGTHS="1024", ROUNDS="2")
    assert states(rows) == {
        "machine": "ok",
        "facts": "ok",
        "kernels": "skipped",
        "setup": "ok",
        "tests": "ok",
        "bench_hbm": "ok",
        "bench_nvme": "ok",
    }
    assert rows["machine"][1].endswith(" cores, no GPU")
    assert (rows["setup"][1], rows["tests"][1]) == ("set up", PASSED)
    assert rows["bench_hbm"][1] == "hbm: 52.8 GB/s"
    results = tree.parent / "results"
    names = {str(each.relative_to(results)) for each in results.rglob("*") if each.is_file()}
    logs = {f"{name}.txt" for name in [*rows, "steps"]}
    assert names == logs | {"gpu.md", "gpu/hbm.json", "gpu/nvme.json"}
    asked = f"--rounds 2 --lengths 1024 --dir {tree / 'disk'} --write"
    assert (tree / "asked").read_text("utf-8").splitlines() == [
        f"bench/gpu.py --parts {part} {asked}" for part in ("hbm", "nvme")
    ]
    assert status == 0
    assert str(results) in said.splitlines()[-1]


def test_steps_after_one_that_failed_are_run_and_the_status_is_1(tree: Path) -> None:
    status, said, rows = run(tree, FACTS="exit 1", TESTS="exit 1", BENCH='[ "$3" != pinned ]')
    assert status == 1
    found = states(rows)
    assert [found.pop(name) for name in ("facts", "tests", "bench_pinned")] == ["failed"] * 3
    assert {found[f"bench_{part}"] for part in ("hbm", "nvme", "ttft")} == {"ok"}
    assert rows["tests"] == ("failed", PASSED)  # and not what make says of it
    assert "failed: facts " in said


def test_what_needs_the_setup_is_skipped_when_it_failed(tree: Path) -> None:
    status, _, rows = run(tree, SETUP="exit 1", PARTS="pinned")
    assert status == 1
    assert (rows["facts"][0], rows["setup"][0]) == ("ok", "failed")
    assert rows["tests"] == rows["bench_pinned"] == ("skipped", "the setup failed")
    assert not (tree / "asked").exists()
    assert not (tree.parent / "results" / "gpu.md").exists()  # it has another machine's figures


def test_run_without_a_gpu_ends_well_and_says_that_nothing_was_measured(tree: Path) -> None:
    outcome = "no CUDA driver (not found): no GPU"
    given = {"PASSED": "skipped", "OUTCOME": outcome, "PARTS": "pinned"}
    status, said, rows = run(tree, FACTS="exit 77", **given)
    assert status == 0
    found = states(rows)
    assert {found.pop(name) for name in ("machine", "setup")} == {"ok"}
    assert set(found.values()) == {"skipped"}
    assert "there is no GPU here; nothing was measured" in said


def test_step_that_does_not_end_is_ended_and_the_others_run(tree: Path) -> None:
    # Those may take longer than a second too, on a busy machine.
    _, _, rows = run(tree, FACTS="exec sleep 1000", LIMIT_S="1", PARTS="pinned")
    assert rows["facts"][0] == "failed"
    assert rows["facts"][1].startswith("not through in 1 s:")
    assert list(rows)[-1] == "bench_pinned"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_that_is_interrupted_ends_its_step_and_leaves_what_it_found(
    tree: Path, number: signal.Signals
) -> None:
    process = start(tree, TESTS="echo $$$$ >pid; exec sleep 1000")
    eventually((tree / "pid").exists, "the step runs")
    eventually(lambda: (tree / "pid").read_text("utf-8").strip(), "it said its process")
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 130
    assert table(tree)["interrupted"][0] == "failed"
    assert table(tree)["setup"][0] == "ok"
    proc = Path("/proc", (tree / "pid").read_text("utf-8").strip(), "cmdline")
    eventually(lambda: not proc.exists() or proc.read_bytes() == b"", "the step's process is gone")


def test_results_of_an_earlier_run_are_not_mixed_with_these(tree: Path) -> None:
    (tree.parent / "results").mkdir()
    (tree.parent / "results" / "facts.txt").touch()
    process = start(tree)
    said, _ = process.communicate()
    assert process.returncode == 2
    assert "is not empty; name a new folder" in said

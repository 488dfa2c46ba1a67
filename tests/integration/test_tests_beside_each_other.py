"""How tests are run: in several processes with one seed, some of them alone, with the conftest.py
that all tests have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
# Each says when it ran, in which process, and what it was given.
TESTS = """
import json, os, time
from pathlib import Path
import pytest
from hypothesis import given, strategies

DRAWN = []

@given(strategies.integers())
def draw(number):
    DRAWN.append(number)

%s
@pytest.mark.parametrize("number", range(4))
def test_one(number, seed, request):
    begun = time.monotonic()
    DRAWN.clear()
    draw()
    seen = {
        "begun": begun, "ended": time.monotonic(), "process": os.getpid(), "seed": seed,
        "run": os.environ["KVW_SEED"], "drawn": DRAWN,
    }
    name = f"{Path(__file__).stem}-{number}"
    Path("seen", name).write_text(json.dumps(seen))
"""


def written(folder: Path) -> Path:
    shutil.copy(CONFTEST, folder)
    (folder / "seen").mkdir()
    (folder / "tmp").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    for name, mark in (("a", ""), ("b", "@pytest.mark.alone"), ("c", "")):
        (folder / f"test_{name}.py").write_text(TESTS % mark)
    return folder


def run(folder: Path, *arguments: str, seed: str | None = None) -> tuple[str, dict[str, Any]]:
    """What was printed, and what each test saw."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVW_", "PYTEST_"))}
    environment["TMPDIR"] = str(folder / "tmp")
    if seed is not None:
        environment["KVW_SEED"] = seed
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, {
        path.name: json.loads(path.read_text()) for path in (folder / "seen").iterdir()
    }


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """A run in two processes: where it was, what it printed, what each test saw."""
    folder = written(tmp_path_factory.mktemp("beside"))
    return folder, *run(folder, "-n", "2", "--dist", "load")


def test_processes_of_a_run_have_its_seed_and_one_process_repeats_them(beside: Any) -> None:
    folder, said, seen = beside
    assert len({each["process"] for each in seen.values()}) == 2
    [seed] = {each["run"] for each in seen.values()}
    assert re.findall(r"^seed: KVW_SEED=(\d+)$", said, re.MULTILINE) == [seed]
    _, again = run(folder, "-n", "0", seed=seed)
    assert len({each["process"] for each in again.values()}) == 1
    for name, each in seen.items():
        assert (again[name]["seed"], again[name]["drawn"]) == (each["seed"], each["drawn"])


def test_test_that_must_run_alone_runs_beside_no_other(beside: Any) -> None:
    folder, _, seen = beside
    alone = {name for name in seen if name.startswith("test_b")}
    assert len(alone) == 4
    for name in alone:
        for other in seen.keys() - {name}:
            before = seen[name]["ended"] <= seen[other]["begun"]
            assert before or seen[other]["ended"] <= seen[name]["begun"], f"{name} beside {other}"
    assert not list((folder / "tmp").glob("kvw-*"))

"""How tests are run: in several processes with one seed, with the conftest.py that all have."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFTEST = Path(__file__).parents[1] / "conftest.py"
# Each says in which process it ran, and what it was given.
TESTS = """
import json, os
from pathlib import Path
import pytest
from hypothesis import given, strategies

DRAWN = []

@given(strategies.integers())
def draw(number):
    DRAWN.append(number)

@pytest.mark.parametrize("number", range(4))
def test_one(number, seed, request):
    DRAWN.clear()
    draw()
    run = os.environ["KVW_SEED"]
    seen = {"process": os.getpid(), "run": run, "seed": seed, "drawn": DRAWN}
    name = f"{Path(__file__).stem}-{number}"
    Path("seen", name).write_text(json.dumps(seen))
"""


def written(folder: Path) -> Path:
    shutil.copy(CONFTEST, folder)
    (folder / "seen").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name in "abc":
        (folder / f"test_{name}.py").write_text(TESTS)
    return folder


def run(folder: Path, *arguments: str, seed: str | None = None) -> tuple[str, dict[str, Any]]:
    """What was printed, and what each test saw."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVW_", "PYTEST_"))}
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


def test_processes_of_a_run_have_its_seed_and_one_process_repeats_them(tmp_path: Path) -> None:
    folder = written(tmp_path)
    said, seen = run(folder, "-n", "2", "--dist", "load")
    assert len({each["process"] for each in seen.values()}) == 2
    [seed] = {each["run"] for each in seen.values()}
    assert re.findall(r"^seed: KVW_SEED=(\d+)$", said, re.MULTILINE) == [seed]
    _, again = run(folder, "-n", "0", seed=seed)
    assert len({each["process"] for each in again.values()}) == 1
    for name, each in seen.items():
        assert (again[name]["seed"], again[name]["drawn"]) == (each["seed"], each["drawn"])


OWN = ("-o", "testpaths=tests")
"""As make names a target's tests."""


def test_command_under_a_failed_run_runs_what_failed_and_nothing_else(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "unit").mkdir(parents=True)
    shutil.copy(CONFTEST, tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tests / "unit" / "test_a.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('what', ['a', 'b c'])\n"
        "def test_one(what, seed):\n    print('given', seed)\n    assert what == 'a'\n"
    )
    (tests / "unit" / "test_b.py").write_text("def test_other():\n    pass\n")

    def run(*arguments: str) -> str:
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                "-o",
                "testpaths=tests",
                *arguments,
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        ).stdout

    said = run("-n", "2", "--dist", "loadfile")
    assert "1 failed, 2 passed" in said
    [command] = [line for line in said.splitlines() if "make test-python" in line]
    [arguments] = [
        word.removeprefix("ARGS=") for word in shlex.split(command) if word.startswith("ARGS=")
    ]
    again = run(*shlex.split(arguments))
    assert "1 failed in" in again

    def given(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("given ")]

    assert given(again) == given(said)

"""The commands that repeat failed tests: what they say, and that a run understands them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.repeating import MOST_NAMED, commands, looked_into

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("test", "said"),
    [
        (
            "tests/unit/test_x.py::test_y",
            'KVW_SEED=7 make test-python ARGS="-n 0 tests/unit/test_x.py::test_y"',
        ),
        (
            "tests/engines/vllm/kinds/test_x.py::test_y",
            'KVW_SEED=7 make test-vllm ARGS="tests/engines/vllm/kinds/test_x.py::test_y"',
        ),
        ("tests/gpu/test_x.py", 'KVW_SEED=7 make test-gpu ARGS="tests/gpu/test_x.py"'),
        ("tests/site/test_x.py", 'KVW_SEED=7 make test-docs ARGS="tests/site/test_x.py"'),
    ],
)
def test_failed_test_is_repeated_by_the_target_of_its_folder(test: str, said: str) -> None:
    assert commands([test], 7, {}) == [said]


def test_failures_of_a_target_are_repeated_in_one_run_each_named_once() -> None:
    failed = ["tests/unit/test_x.py::test_b", "tests/unit/test_x.py::test_a"]
    # A test that failed and whose fixture failed after it is told twice.
    [command] = commands([*failed, failed[0]], 7, {})
    assert command == f'KVW_SEED=7 make test-python ARGS="-n 0 {" ".join(failed)}"'


def test_many_failures_are_repeated_by_their_files() -> None:
    failed = [f"tests/unit/test_x.py::test_y[{each}]" for each in range(MOST_NAMED + 1)]
    [command] = commands([*failed, "tests/unit/test_z.py::test_y"], 7, {})
    assert command.endswith('"-n 0 tests/unit/test_x.py tests/unit/test_z.py"')


def test_what_the_run_was_scaled_by_is_repeated() -> None:
    environment = {"KVW_ROUNDS": "5", "HOME": "/nowhere"}
    [command] = commands(["tests/unit/test_x.py::test_y"], 7, environment)
    assert command.startswith("KVW_SEED=7 KVW_ROUNDS=5 make test-python")


@pytest.mark.parametrize("parameter", ["a b", "it's", '"', "$HOME", "$$", "`id`", "\\", "(*)", "é"])
def test_name_comes_through_make_and_both_shells_unchanged(tmp_path: Path, parameter: str) -> None:
    test = f"tests/unit/test_x.py::test_y[{parameter}]"
    [command] = commands([test], 7, {})
    (tmp_path / "Makefile").write_text(
        "SHELL := /bin/bash\nARGS ?=\ntest-python:\n\t@printf '%s\\n' $(ARGS)\n"
    )
    ran = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == ["-n", "0", test]


def test_what_args_name_is_all_that_a_target_runs() -> None:
    """A target's own tests are pytest's testpaths: of a folder and a test, pytest runs both."""
    test = "tests/unit/test_repeating.py::test_y"
    lanes = ["test-python", "test-unit", "test-gpu", "test-lowest", "test-engines-full"]
    ran = subprocess.run(
        ["make", "-n", *lanes, f"ARGS={test}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    calls = [shlex.split(line) for line in ran.stdout.splitlines() if " -m pytest " in line]
    assert len(calls) > len(lanes), "of test-engines-full one for each engine"
    for words in calls:
        after = words[words.index("pytest") + 1 :]
        assert [each for each in after if each.startswith("tests")] == [test]
        [own] = [each for each in after if each.startswith("testpaths=")]
        named = shlex.split(own.removeprefix("testpaths="))
        assert all(any(ROOT.glob(each)) for each in named), own


def test_folder_and_file_named_together_are_both_run() -> None:
    """Incident: beside a file, a folder was left out without a word."""
    both = ["tests/contract/trtllm", "tests/unit/test_repeating.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *both],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(f"\n{each}" in f"\n{ran.stdout}" for each in both)


def test_named_test_is_run_where_its_folder_is_left_out_of_a_run() -> None:
    ignored = ["tests/gpu", "tests/engines"]
    assert looked_into(ignored, ["tests"]) == ignored
    assert looked_into(ignored, ["tests/gpu/test_x.py::test_y"]) == ["tests/engines"]

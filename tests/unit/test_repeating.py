"""The commands that repeat failed tests: what they say, and that a run understands them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from testkit.repeating import MOST_NAMED, chosen, commands, looked_into

CONFTEST = Path(__file__).parents[1] / "conftest.py"


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


@pytest.mark.parametrize(
    ("given", "ran"),
    [
        (["tests"], ["tests"]),
        (["tests", "tests/unit"], ["tests/unit"]),
        (["tests", "tests/unit", "tests/fault"], ["tests/unit", "tests/fault"]),
        (["tests", "tests/unit/test_x.py::test_y"], ["tests/unit/test_x.py::test_y"]),
        (["tests/engines/vllm/kinds", "tests/x.py::test_y"], ["tests/x.py::test_y"]),
        (["tests", "tests/unit/test_x.py::test_y[a/b]"], ["tests/unit/test_x.py::test_y[a/b]"]),
    ],
)
def test_what_is_named_inside_a_folder_stands_for_it(given: list[str], ran: list[str]) -> None:
    assert chosen(given) == ran


def test_named_test_is_run_where_its_folder_is_left_out_of_a_run() -> None:
    ignored = ["tests/gpu", "tests/engines"]
    assert looked_into(ignored, ["tests"]) == ignored
    assert looked_into(ignored, ["tests/gpu/test_x.py::test_y"]) == ["tests/engines"]

"""The table of docs/verified.md, and how its lanes are started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import verify


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """What is started; nothing is."""
    started: list[list[str]] = []
    run = subprocess.run

    def pretend(command: list[str], **options: Any) -> Any:
        if command[0] != "make":
            return run(command, **options)
        started.append(command)
        options["stdout"].write("= 7 passed, 1 skipped in 3.10s =\nFAILED tests/a.py::b - why\n")
        return subprocess.CompletedProcess(command, 1 if "test-dynamo" in command else 0)

    monkeypatch.setattr(verify.subprocess, "run", pretend)
    monkeypatch.setattr(verify, "ROOT", Path(verify.__file__).parent.parent)
    monkeypatch.setattr(verify, "TABLE", verify.ROOT / "build" / f"{tmp_path.name}.md")
    yield started
    verify.TABLE.unlink(missing_ok=True)


def test_lanes_do_not_take_the_names_of_lanes_for_arguments_of_their_own(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make test-full ARGS="trtllm dynamo"` gave pytest these words, and both lanes failed."""
    monkeypatch.setattr(verify.sys, "argv", ["verify.py", "trtllm", "soak"])
    assert verify.main() == 0
    assert commands == [
        ["make", "test-trtllm", "ARGS="],
        ["make", "soak", "KVW_SOAK_MINUTES=5", "ARGS="],
    ]


def test_row_of_a_lane_is_replaced_and_those_of_others_stay_in_order(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for lanes, status in ((["dynamo", "trtllm"], 1), (["transformers", "trtllm"], 0)):
        monkeypatch.setattr(verify.sys, "argv", ["verify.py", *lanes])
        assert verify.main() == status
    rows = [line for line in verify.TABLE.read_text("utf-8").splitlines() if "`make " in line][1:]
    assert [row.split(" | ")[0] for row in rows] == ["| transformers", "| dynamo", "| trtllm"]
    assert rows[1].endswith("| 7 passed, 1 skipped | tests/a.py::b |")
    assert rows[2].endswith("| 7 passed, 1 skipped | nothing |")


@pytest.mark.parametrize(
    ("output", "ran"),
    [
        ("100% tests passed, 0 tests failed out of 70\n", "70 passed"),
        ("97% tests passed, 2 tests failed out of 70\n", "68 passed"),
        ("100% tests passed out of 70\n= 9 passed in 23.26s =\n", "79 passed"),
        (
            "98% tests passed, 1 test failed out of 61\n"
            "gpu_hbm_test: 12 tests, each in a process of its own\n"
            "gpu_waiting_test: 8 tests, each in a process of its own\n",
            "80 passed",
        ),
        ("nothing wrong, nothing lost\n", "nothing wrong, nothing lost"),
    ],
)
def test_tests_of_every_runner_are_counted(output: str, ran: str) -> None:
    """`make asan` had 70 native tests and was said to have run 9: CTest's words had changed."""
    assert verify.Result("asan", "asan", 0, 1.0, output).ran == ran

"""The run that counts injected faults: what it calls a proof, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from testkit import fault_run, tally
from testkit.fault_classes import BY_NAME, CLASSES
from testkit.fault_run import LEAST, LEAST_LIVE, Run, Step, failures

ENOUGH = Counter({each.name: LEAST for each in CLASSES})
GUARANTEES = Path("docs/guarantees.md")


def ended(status: int) -> Step:
    return Step("step", ["program"], status=status)


def test_run_is_a_proof_when_all_steps_passed_and_every_class_was_injected() -> None:
    assert failures([ended(0)], ENOUGH) == []


@pytest.mark.parametrize("status", [1, -9, 124, None])
def test_run_is_no_proof_when_a_step_did_not_pass(status: int | None) -> None:
    assert failures([ended(0), Step("sick", ["program"], status=status)], ENOUGH) == ["sick failed"]


def test_run_is_no_proof_when_a_class_was_left_out() -> None:
    name = CLASSES[-1].name
    why = failures([ended(0)], Counter({**ENOUGH, name: 0}))
    assert any(name in each for each in why)


def test_run_is_no_proof_when_too_few_faults_were_injected() -> None:
    few = failures([ended(0)], Counter({each.name: 1 for each in CLASSES}))
    assert any(f"{LEAST:,}" in why for why in few)
    assert any(f"{LEAST_LIVE:,}" in why for why in few)


def test_inputs_of_fuzzers_are_no_faults() -> None:
    many = Counter({each.name: 10**9 if each.is_input else 1 for each in CLASSES})
    assert any(f"{LEAST:,}" in why for why in failures([ended(0)], many))


def test_page_says_what_is_checked_after_each_fault() -> None:
    """Between two runs a class may be changed: its count stays, what is said of it does not."""
    rows = [line.strip("| ").split(" | ") for line in GUARANTEES.read_text("utf-8").splitlines()]
    said = {row[0]: row[-1] for row in rows if len(row) == 4 and row[0] in BY_NAME}
    assert len(said) > len(CLASSES) / 2
    assert said == {name: BY_NAME[name].holds for name in said}


def test_step_that_fails_is_seen_and_what_it_counted_before_stays(tmp_path: Path) -> None:
    name = CLASSES[0].name
    code = f"from testkit import tally; tally.count({name!r}, 3); raise SystemExit(5)"
    run = Run("7", tmp_path / "run")
    steps = [Step("fails", [sys.executable, "-P", "-c", code]), Step("runs", ["true"])]
    run.go(steps, lanes=2)
    assert [step.status for step in steps] == [5, 0]
    assert run.counts() == {name: 3}


def test_steps_get_the_seed_of_the_run_and_are_replayed_with_it(tmp_path: Path) -> None:
    run = Run("12345", tmp_path / "run")
    step = Step("says", ["sh", "-c", "echo $KVW_SEED $SCALE"], {"SCALE": "9"})
    run.go([step], lanes=1)
    assert step.log.read_text() == "12345 9\n"
    assert step.replay("12345").startswith("KVW_SEED=12345 SCALE=9 sh -c")


def test_counts_of_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        tally.count("a fault that nobody has described")
    (tmp_path / "x.tally").write_text(json.dumps({"made up": 1}))
    with pytest.raises(KeyError):
        tally.read(tmp_path)


def test_nothing_is_written_without_a_folder_to_write_to(tmp_path: Path) -> None:
    code = f"from testkit import tally; tally.count({CLASSES[0].name!r})"
    bare = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=bare, check=True)
    assert list(tmp_path.iterdir()) == []


def test_names_of_classes_are_unique_and_fit_a_table_and_the_native_tally() -> None:
    assert len(BY_NAME) == len(CLASSES)
    for each in CLASSES:
        assert not set('|"\\\n') & set(each.name + each.holds), each.name
        assert each.promise in ("never wrong", "nothing lost", "bounded"), each.name


def test_counts_are_written_between_the_marks_and_nowhere_else() -> None:
    conditions = fault_run.Conditions("42", 600.0, "a machine")
    before = f"# Words\n{fault_run.BEGIN}STALE\n{fault_run.END}more words\n"
    after = fault_run.with_counts(before, ENOUGH, conditions)
    assert after.startswith(f"# Words\n{fault_run.BEGIN}")
    assert after.endswith(f"{fault_run.END}more words\n")
    assert "STALE" not in after
    assert "seed 42" in after
    assert all(f"| {each.name} | {LEAST:,} |" in after for each in CLASSES)
    assert fault_run.with_counts(after, ENOUGH, conditions) == after


def test_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a line"):
        fault_run.with_counts("# Words\n", ENOUGH, fault_run.Conditions("1", 1.0, "m"))


def test_document_of_this_project_has_its_marks() -> None:
    text = (Path(__file__).parents[2] / GUARANTEES).read_text(encoding="utf-8")
    assert fault_run.BEGIN in text
    assert fault_run.END in text

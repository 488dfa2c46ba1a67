"""What the parts of bench/gpu.py found: a file each, so that they can be run one at a time and each
again, and in docs/gpu.md what has run, on what, and what has not.

Files of another machine, driver or torch are passed over: one table is of one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvwarehouse_bench.gpu.goals import PartOutcome, lines_of
from kvwarehouse_bench.harness.markdown import replace_section
from kvwarehouse_bench.micro.figures import Figure, Result, read_results, write_result

_WHY = "why not"
"""Beside the conditions, which do not have it."""

BEGIN = "<!-- written by make bench-gpu, do not edit -->\n"
END = "<!-- end of what make bench-gpu wrote -->\n"


def keep(outcome: PartOutcome, conditions: Mapping[str, str], folder: Path) -> None:
    """In place of what the part found before, unless it found nothing now."""
    before = {each.part: each for each in kept([outcome.part], conditions, folder)}
    if not outcome.figures and before.get(outcome.part, outcome).figures:
        return
    told = {**conditions, _WHY: outcome.why_not}
    write_result(Result(outcome.part, told, outcome.figures), folder)


def kept(parts: Sequence[str], conditions: Mapping[str, str], folder: Path) -> list[PartOutcome]:
    """In the order of the parts; those that have not run here are not among them."""
    return [
        _outcome(result)
        for result in read_results(folder, parts)
        if {name: told for name, told in result.conditions.items() if name != _WHY} == conditions
    ]


def _outcome(result: Result) -> PartOutcome:
    figures = [each for each in result.found if isinstance(each, Figure)]
    return PartOutcome(result.measure, figures, result.conditions.get(_WHY, ""))


def with_outcomes(
    document: str,
    conditions: Mapping[str, str],
    words: Sequence[str],
    outcomes: Sequence[PartOutcome],
) -> str:
    """words: what the machine has and what fell back to what. ValueError without the marks."""
    rows = ["| figure | goal | measured | verdict |", "|---|---|---|---|"]
    rows += ["| " + " | ".join(map(_cell, line)) + " |" for line in lines_of(outcomes)]
    ran = [outcome.part for outcome in outcomes if outcome.figures]
    lanes = [
        f"Lanes that have run here: {', '.join(ran) or 'none'}.",
        *(f"- {_why(each)}." for each in outcomes if each.why_not),
    ]
    parts = [
        "\n".join(f"- {name}: {value}" for name, value in conditions.items()),
        "\n".join(f"- {line}" for line in words),
        "\n".join(lanes),
        "\n".join(rows),
    ]
    return replace_section(document, BEGIN, END, "\n" + "\n\n".join(parts) + "\n\n")


def _why(outcome: PartOutcome) -> str:
    said = "left something out" if outcome.figures else "has not"
    return f"`{outcome.part}` {said}: {outcome.why_not}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

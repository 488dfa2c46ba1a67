"""What parts found, a file each, so that they can be run one at a time and each again. Those of
another machine, driver or torch are passed over: one table is of one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvwarehouse_bench.gpu.goals import PartOutcome
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.results import Result, read_results, write_result

_WHY = "why not"
"""Beside the conditions, which do not have it."""


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

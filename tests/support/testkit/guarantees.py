"""The counts in docs/guarantees.md, from a run of `make faults`. The words around them are the
document's own. Pure."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvwarehouse_bench.harness.markdown import replace_section
from testkit.fault_classes import CLASSES, FaultClass, faults, inputs

BEGIN: Final = "<!-- counts: written by make faults, do not edit -->\n"
END: Final = "<!-- end of counts -->\n"


@dataclass(frozen=True)
class Conditions:
    seed: str
    took_s: float
    machine: str


def with_counts(document: str, counts: Counter[str], conditions: Conditions) -> str:
    """The document with what stands between its marks replaced. ValueError when it has no marks."""
    return replace_section(document, BEGIN, END, _block(counts, conditions))


def _block(counts: Counter[str], conditions: Conditions) -> str:
    lines = [
        f"**{faults(counts):,} faults, {faults(counts, live=True):,} of them against a running"
        f" warehouse, and {inputs(counts):,} hostile inputs: no wrong byte was served, nothing was"
        " lost that was promised to be kept.**",
        f"{conditions.took_s / 60:.0f} minutes on {conditions.machine},"
        f" {datetime.datetime.now(datetime.UTC).date().isoformat()}, seed {conditions.seed}.",
    ]
    for promise in dict.fromkeys(each.promise for each in CLASSES):
        classes = [each for each in CLASSES if each.promise == promise]
        lines += [
            "",
            f"### {promise.capitalize()}",
            "",
            "| fault | injected | where | what was checked after each |",
            "|---|---:|---|---|",
            *(_row(each, counts) for each in classes),
        ]
    return "\n".join([*lines, ""])


def _row(each: FaultClass, counts: Counter[str]) -> str:
    where = "live" if each.live else "in process"
    return f"| {each.name} | {counts[each.name]:,} | {where} | {each.holds} |"

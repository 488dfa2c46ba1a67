"""docs/gpu.md: what has run, on what, and what has not. Pure, but for read and write of the
caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvwarehouse.cli.generated_section import replace_section
from kvwarehouse_bench.gpu.goals import PartOutcome, lines_of

BEGIN = "<!-- written by make bench-gpu, do not edit -->\n"
END = "<!-- end of what make bench-gpu wrote -->\n"


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

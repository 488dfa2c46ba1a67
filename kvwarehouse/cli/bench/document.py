"""What measures found, as the part of a Markdown document that stands between its marks. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvwarehouse.cli.bench.figures import MISSED
from kvwarehouse.cli.bench.report import conditions_of, goals_table, result_blocks
from kvwarehouse.cli.bench.results import Result
from kvwarehouse.cli.marked_text import between_marks
from kvwarehouse.planner.report import Plot, TableBlock

BEGIN: Final = "<!-- warehouse alone: written by make bench ARGS=--write, do not edit -->\n"
END: Final = "<!-- end of warehouse alone -->\n"


def with_results(document: str, results: Sequence[Result], pictures: str) -> str:
    """pictures: the folder of picture_name(...), as links from the document see it. ValueError when
    it has no marks."""
    return between_marks(document, BEGIN, END, _section(results, pictures))


def picture_name(plot: Plot) -> str:
    return "warehouse_" + re.sub(r"[^a-z0-9]+", "_", plot.title.lower()).strip("_") + ".png"


def _section(results: Sequence[Result], pictures: str) -> str:
    parts = [
        "; ".join(f"{name}: {value}" for name, value in conditions_of(results)) + ".",
        f"Alternating rounds of each measure, and the machine's load before it: {_runs(results)}.",
        "### Goals and what was seen",
        _table(goals_table(results), _cell),
    ]
    for result in results:
        parts += [f"### `bench {result.measure}`"]
        for block in result_blocks(result):
            parts.append(
                f"![{block.title}]({pictures}/{picture_name(block)})"
                if isinstance(block, Plot)
                else _table(block, _cell)
            )
    return "\n" + "\n\n".join(parts) + "\n\n"


def _runs(results: Sequence[Result]) -> str:
    """The load over a minute."""
    return ", ".join(
        f"{result.measure} {result.conditions.get('rounds', '?').partition(',')[0]} at"
        f" {result.conditions.get('load before', '?').split()[0]}"
        for result in results
    )


def _table(block: TableBlock, cell: Callable[[Any], str]) -> str:
    kept = [at for at in range(len(block.columns)) if any(str(row[at]) for row in block.rows)]
    columns = [block.columns[at] for at in kept]
    lines = [
        _row(column.lstrip(">") for column in columns),
        "|" + "|".join("---:" if column.startswith(">") else "---" for column in columns) + "|",
        *(_row(cell(row[at]) for at in kept) for row in block.rows),
    ]
    return "\n".join(lines)


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any) -> str:
    return f"**{value}**" if value == MISSED else str(value).replace("|", "\\|")

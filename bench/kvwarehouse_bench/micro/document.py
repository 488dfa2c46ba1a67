"""What measures found, as the part of a Markdown document that stands between its marks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvwarehouse.cli import markdown
from kvwarehouse.cli.generated_section import replace_section
from kvwarehouse.report.report import Plot
from kvwarehouse_bench.micro.figures import MISSED
from kvwarehouse_bench.micro.report import conditions_of, goals_table, result_blocks
from kvwarehouse_bench.micro.results import Result

BEGIN: Final = "<!-- warehouse alone: written by make bench ARGS=--write, do not edit -->\n"
END: Final = "<!-- end of warehouse alone -->\n"
_PREFIX = "warehouse"


def with_results(document: str, results: Sequence[Result], pictures: str) -> str:
    """pictures: the folder of picture_name(...), as links from the document see it. ValueError when
    it has no marks."""
    return replace_section(document, BEGIN, END, _section(results, pictures))


def picture_name(plot: Plot) -> str:
    return markdown.picture_name(plot, _PREFIX)


def _section(results: Sequence[Result], pictures: str) -> str:
    parts = [
        "; ".join(f"{name}: {value}" for name, value in conditions_of(results)) + ".",
        f"Alternating rounds of each measure, and the machine's load before it: {_runs(results)}.",
        "### Goals and what was seen",
        markdown.markdown_table(goals_table(results), bold=[MISSED]),
    ]
    for result in results:
        blocks = result_blocks(result)
        parts += [
            f"### `bench {result.measure}`",
            *markdown.markdown_blocks(blocks, pictures, _PREFIX, bold=[MISSED]),
        ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def _runs(results: Sequence[Result]) -> str:
    """The load over a minute."""
    return ", ".join(
        f"{result.measure} {result.conditions.get('rounds', '?').partition(',')[0]} at"
        f" {result.conditions.get('load before', '?').split()[0]}"
        for result in results
    )

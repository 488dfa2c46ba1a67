"""What measures found, as tables and plots: for a page, pictures, and the part of a Markdown
document that stands between its marks. Stateless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse_bench.harness import markdown
from kvwarehouse_bench.harness.markdown import replace_section
from kvwarehouse_bench.micro.figures import (
    FIGURE_COLUMNS,
    MISSED,
    Curve,
    Figure,
    Result,
    by_plot,
    curve_table,
    figure_row,
)

_OF_EACH = ("load before", "load after", "moved", "rounds")
_LOG_FROM = 20
_NOTES = (
    "Medians over alternating rounds; a ratio is the median of the rounds' ratios, in brackets the"
    " middle half of them.",
    "What grows: the cost of one item. A line that rises is cost that grows faster than the number"
    " of items.",
)

BEGIN: Final = "<!-- warehouse alone: written by make bench ARGS=--write, do not edit -->\n"
END: Final = "<!-- end of warehouse alone -->\n"
_PREFIX = "warehouse"


def bench_report(results: Sequence[Result]) -> Report:
    blocks: list[TableBlock | Plot] = [_conditions(results), goals_table(results), _runs(results)]
    for result in results:
        blocks += result_blocks(result)
    return Report(
        title="The warehouse alone, beside what this machine can do",
        summary=_summary(results),
        blocks=blocks,
        figures={"results": [result.as_json() for result in results]},
        notes=_NOTES,
    )


def result_blocks(result: Result) -> list[TableBlock | Plot]:
    """A measure's table of figures, then table and plot of each of its curves."""
    blocks: list[TableBlock | Plot] = []
    figures = _figures(result)
    if figures:
        blocks.append(TableBlock(result.measure, FIGURE_COLUMNS, [figure_row(f) for f in figures]))
    for name, curves in by_plot(result.found).items():
        blocks += [plot_of(curves), TableBlock(f"{name}, figures", *curve_table(curves))]
    return blocks


def plot_of(curves: Sequence[Curve]) -> Plot:
    first = curves[0]
    series = [Series(curve.name, curve.points) for curve in curves]
    values = [y for curve in curves for _, y in curve.points]
    # Over less, a logarithmic axis makes much of little.
    log_y = min(values) > 0 and max(values) / min(values) >= _LOG_FROM
    return Plot(first.plot, first.x_label, first.y_label, series, log_x=True, log_y=log_y)


def plots(results: Sequence[Result]) -> list[Plot]:
    return [plot_of(curves) for result in results for curves in by_plot(result.found).values()]


def goals_table(results: Sequence[Result]) -> TableBlock:
    """Every figure that has a goal, missed ones too."""
    judged = [each for result in results for each in _figures(result) if each.goal]
    return TableBlock("goals", FIGURE_COLUMNS, [figure_row(each) for each in judged])


def conditions_of(results: Sequence[Result]) -> list[tuple[str, str]]:
    """What all results have in common; where they differ, every value."""
    names = [name for result in results for name in result.conditions if name not in _OF_EACH]
    return [
        (
            name,
            "; ".join(dict.fromkeys(r.conditions[name] for r in results if name in r.conditions)),
        )
        for name in dict.fromkeys(names)
    ]


def _conditions(results: Sequence[Result]) -> TableBlock:
    return TableBlock("conditions", ("", ""), conditions_of(results))


def _runs(results: Sequence[Result]) -> TableBlock:
    rows = [(r.measure, *(r.conditions.get(name, "") for name in _OF_EACH)) for r in results]
    return TableBlock("runs", ("measure", *_OF_EACH), rows)


def _summary(results: Sequence[Result]) -> str:
    verdicts = [each.verdict for result in results for each in _figures(result) if each.verdict]
    missed = verdicts.count(MISSED)
    return f"{len(verdicts) - missed} of {len(verdicts)} goals met, {missed} missed."


def _figures(result: Result) -> list[Figure]:
    return [each for each in result.found if isinstance(each, Figure)]


def with_results(document: str, results: Sequence[Result], pictures: str) -> str:
    """pictures: the folder of picture_name(...), as links from the document see it. ValueError when
    it has no marks."""
    return replace_section(document, BEGIN, END, _section(results, pictures))


def picture_name(plot: Plot) -> str:
    return markdown.picture_name(plot, _PREFIX)


def _section(results: Sequence[Result], pictures: str) -> str:
    parts = [
        "; ".join(f"{name}: {value}" for name, value in conditions_of(results)) + ".",
        "Alternating rounds of each measure, and the machine's load before it:"
        f" {_loads_before(results)}.",
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


def _loads_before(results: Sequence[Result]) -> str:
    """The load over a minute."""
    return ", ".join(
        f"{result.measure} {result.conditions.get('rounds', '?').partition(',')[0]} at"
        f" {result.conditions.get('load before', '?').split()[0]}"
        for result in results
    )

"""A report as one HTML page that needs nothing else: no network, no script, plots as inline SVG
whose points tell their values and whose lines can be hidden one by one.

Stateless; thread-safe. Every text is escaped: names come from files that others wrote.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from kvwarehouse.errors import UsageError
from kvwarehouse.report.plot import line_class, svg_of
from kvwarehouse.report.report import Plot, Report, TableBlock

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .75rem; text-align: left; border-bottom: 1px solid #8886; }
.right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { max-width: 100%; height: auto; display: block; }
.lines label { margin-right: 1.5rem; }
.note { opacity: .8; }
"""

# The page may load nothing, whatever is in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_of(report: Report) -> str:
    """The whole page."""
    blocks = [
        _table(each) if isinstance(each, TableBlock) else _plot(each) for each in report.blocks
    ]
    most_lines = max((len(b.series) for b in report.blocks if isinstance(b, Plot)), default=0)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(report.title)}</title>"
            f"<style>{_STYLE}{_hiding(most_lines)}</style></head><body>",
            f"<h1>{escape(report.title)}</h1><p>{escape(report.summary)}</p>",
            *blocks,
            f'<h2>Assumptions</h2><ul class="note">{notes}</ul>' if notes else "",
            "</body></html>",
            "",
        ]
    )


def write_page(report: Report, path: str | Path) -> None:
    """Raises UsageError where the file cannot be written."""
    try:
        Path(path).write_text(page_of(report), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the report {path} cannot be written: {error.strerror}; give a path in a folder that"
            " exists",
            code="bad_html_path",
        ) from error


def _plot(plot: Plot) -> str:
    """The boxes stand beside the picture, where a style sheet alone can tie them to its lines."""
    if len(plot.series) < 2:
        return f"<h2>{escape(plot.title)}</h2>\n{svg_of(plot)}"
    boxes = "".join(
        f'<label><input type="checkbox" checked class="{line_class(at)}"> '
        f"{escape(series.name)}</label>"
        for at, series in enumerate(plot.series)
    )
    return (
        f"<h2>{escape(plot.title)}</h2>\n"
        f'<div class="plot"><div class="lines">{boxes}</div>\n{svg_of(plot)}</div>'
    )


def _hiding(lines: int) -> str:
    """Rules that fade a line whose box is not checked."""
    return "".join(
        f".plot:has(input.{line_class(at)}:not(:checked)) g.{line_class(at)} "
        "{ opacity: .06; pointer-events: none; }\n"
        for at in range(lines)
    )


def _table(block: TableBlock) -> str:
    right = [column.startswith(">") for column in block.columns]
    head = "".join(
        f"<th{_side(is_right)}>{escape(column.lstrip('>'))}</th>"
        for column, is_right in zip(block.columns, right, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{_side(is_right)}>{escape(_cell(value))}</td>"
            for value, is_right in zip(row, right, strict=True)
        )
        + "</tr>\n"
        for row in block.rows
    )
    note = f'<p class="note">{escape(block.note)}</p>' if block.note else ""
    return (
        f'<h2>{escape(block.title)}</h2><div class="wide"><table><tr>{head}</tr>\n{rows}</table>'
        f"</div>{note}"
    )


def _side(right: bool) -> str:
    return ' class="right"' if right else ""


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)

"""Tables and plots of a report as Markdown, and the parts of documents that programs write: what
stands between two marks. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvwarehouse.report.report import Plot, TableBlock


def markdown_blocks(
    blocks: Iterable[TableBlock | Plot], pictures: str, prefix: str, *, bold: Sequence[str] = ()
) -> list[str]:
    """A part for each block. pictures: the folder of picture_name(...), as links from the document
    see it. bold: cells that are."""
    return [
        f"![{block.title}]({pictures}/{picture_name(block, prefix)})"
        if isinstance(block, Plot)
        else markdown_table(block, bold=bold)
        for block in blocks
    ]


def picture_name(plot: Plot, prefix: str) -> str:
    return f"{prefix}_" + re.sub(r"[^a-z0-9]+", "_", plot.title.lower()).strip("_") + ".png"


def markdown_table(block: TableBlock, *, bold: Sequence[str] = ()) -> str:
    """Without columns that are empty in every row."""
    kept = [at for at in range(len(block.columns)) if any(str(row[at]) for row in block.rows)]
    columns = [block.columns[at] for at in kept]
    lines = [
        _row(column.lstrip(">") for column in columns),
        "|" + "|".join("---:" if column.startswith(">") else "---" for column in columns) + "|",
        *(_row(_cell(row[at], bold) for at in kept) for row in block.rows),
    ]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any, bold: Sequence[str]) -> str:
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return f"**{text}**" if text in bold else text


def replace_section(document: str, begin: str, end: str, text: str) -> str:
    """The document with what stands between its marks, each on a line of its own, replaced.
    ValueError when it has no marks."""
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the document needs a line {begin!r} and, below, a line {end!r}")
    return before + begin + text + end + after

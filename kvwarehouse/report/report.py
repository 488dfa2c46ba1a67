"""What a command found: tables and plots, whatever they are shown on.

Plain immutable values; thread-safe. The command line prints the tables, html.py makes one HTML page
of all of it, and `figures` is what --json prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TableBlock:
    """A column whose name starts with ">" is set to the right. Cells are shown as they are, whole
    numbers with separators."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """One line of a plot; points with x in rising order."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Report:
    """`notes` are assumptions and warnings that stand under everything."""

    title: str
    summary: str
    blocks: Sequence[TableBlock | Plot]
    figures: Mapping[str, Any]
    notes: Sequence[str] = field(default=())

    @property
    def tables(self) -> list[TableBlock]:
        return [block for block in self.blocks if isinstance(block, TableBlock)]

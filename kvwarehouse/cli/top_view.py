"""How `kvwarehouse top` looks: a frame as lines of text, each at most as wide as is asked for. What
does not fit is left out, the least important column first. Stateless; thread-safe.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kvwarehouse.cli.top_frame import Frame, LossLine, NamespaceLine, TierLine
from kvwarehouse.cli.top_history import KEPT, History
from kvwarehouse.durations import format_duration
from kvwarehouse.sizes import format_size

MOST_COLUMNS: Final = 100
"""A wider frame would be harder to read."""

_GAP: Final = 2
_LABEL: Final = 12  # columns of what stands before a sentence
_NAMESPACES: Final = 5
_LEAST_MODEL: Final = 14
_MOST_MODEL: Final = 44
_LEAST_CURVE: Final = 8
_CURVE: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class View:
    columns: int
    """Of the terminal."""
    unicode: bool
    """Whether it can show blocks."""
    every_s: float
    """Between two looks."""


@dataclass(frozen=True)
class _Column:
    """`rank`: the highest are left out first where the terminal is too narrow."""

    title: str
    width: int
    rank: int
    right: bool = True


def lines_of(history: History, now: datetime, view: View) -> list[Text]:
    """The last frame. While nobody answers, that and, dim, what was seen last."""
    view = View(max(1, min(view.columns, MOST_COLUMNS)), view.unicode, view.every_s)
    frame = history.frame
    if history.unreachable is not None:
        shown = list(_unreachable(history, now, view))
        if frame is not None and history.seen_at is not None:
            old = [Text(), Text(f"at {_clock(history.seen_at)}:"), *_body(frame, history, view)]
            shown += [_dimmed(line) for line in old]
    elif frame is None:
        shown = []
    else:
        shown = [*_head(frame, history, now, view), *_body(frame, history, view)]
    for line in shown:
        line.truncate(view.columns)
        line.rstrip()
    return shown


def _dimmed(line: Text) -> Text:
    return Text(line.plain, style="dim")


def _clock(at: datetime) -> str:
    return f"{at:%H:%M:%S}"


# --- what stands above: who it is, and whether it is well


def _head(frame: Frame, history: History, now: datetime, view: View) -> Iterator[Text]:
    good = frame.state == "serving"
    facts = [
        (f"kvwarehouse {_printable(frame.name)}", "bold"),
        (frame.state, "bold green" if good else "bold yellow"),
        (f"up {format_duration(frame.uptime_s)}", ""),
        (f"start {frame.incarnation}", "dim"),
        (f"version {_printable(frame.version)}", "dim"),
    ]
    yield _beside(facts, f"{_clock(now)}, every {format_duration(view.every_s)}", view)
    if history.restarted_at is not None:
        yield from _said("restarted", f"at {_clock(history.restarted_at)}", "yellow", view)
    yield Text()
    if not frame.problems:
        yield from _said("health", "ok", "green", view)
    for place, problem in enumerate(frame.problems):
        reason = f": {problem.reason}" if problem.reason else ""
        text = f"{problem.what}{reason} (for {format_duration(problem.for_s)})"
        yield from _said("" if place else "health", text, "bold yellow", view)


def _beside(facts: Sequence[tuple[str, str]], right: str, view: View) -> Text:
    """As many facts as fit beside what stands at the right end; the first two before that."""
    line = Text()
    if sum(cell_len(text) + _GAP for text, _ in facts[:2]) + len(right) > view.columns:
        right = ""
    for text, style in facts:
        room = view.columns - line.cell_len - (_GAP + len(right) if right else 0)
        gap = _GAP if line else 0
        if line and gap + cell_len(text) > room:
            break
        line.append(" " * gap).append(text, style)
    if right:
        line.append(" " * (view.columns - line.cell_len - len(right))).append(right, "dim")
    return line


def _unreachable(history: History, now: datetime, view: View) -> Iterator[Text]:
    lost = history.unreachable
    assert lost is not None
    name = f"kvwarehouse {_printable(history.frame.name)}" if history.frame else "kvwarehouse"
    again = f"{_clock(now)}, every {format_duration(view.every_s)}"
    yield _beside([(name, "bold"), ("not reachable", "bold red")], again, view)
    yield Text()
    text = f"{lost.reason} (since {_clock(lost.since)}; trying again)"
    yield from _said("why", text, "bold red", view)


def _said(label: str, text: str, style: str, view: View) -> Iterator[Text]:
    """A sentence behind its label, over as many lines as it takes."""
    indent = _LABEL if view.columns >= 3 * _LABEL else 0
    parts = textwrap.wrap(_printable(text), max(1, view.columns - indent)) or [""]
    if label and not indent:
        yield Text(label, "bold")
    for place, part in enumerate(parts):
        line = Text((label if not place else "").ljust(indent) if indent else "", "bold")
        yield line.append(part, style) if style else line.append(part, "not bold")


# --- what stands below: tiers, traffic, work and namespaces


def _body(frame: Frame, history: History, view: View) -> Iterator[Text]:
    yield from _said("hit rate", _hit_rate(frame), "", view)
    yield Text()
    yield from _tiers(frame, view)
    yield Text()
    yield from _traffic(frame, history, view)
    yield Text()
    yield from _right_now(frame, view)
    yield from _losses(history.losses, view)
    yield from _namespaces(frame.namespaces, view)


def _tiers(frame: Frame, view: View) -> Iterator[Text]:
    columns = (
        _Column("tier", 6, 0, right=False),
        _Column("used", 8, 3, right=False),
        _Column("", 4, 0),
        _Column("bytes", 20, 2),
        _Column("pages", 10, 4),
        _Column("hits", 6, 1),
        _Column("in/s", 6, 5),
        _Column("out/s", 6, 6),
    )
    shown = [tier for tier in frame.tiers if tier.name != "hbm" or tier.health != "off"]
    yield from _table(columns, (_tier(tier, view) for tier in shown), view)


def _tier(tier: TierLine, view: View) -> list[str | Text]:
    if not tier.capacity_bytes:
        return [tier.name, "off" if tier.health == "off" else "-", *[""] * 6]
    share = tier.used_bytes / tier.capacity_bytes
    return [
        tier.name,
        _bar(share, 8, view),
        f"{share:.0%}",
        f"{format_size(tier.used_bytes)} of {format_size(tier.capacity_bytes)}",
        "" if tier.pages is None else f"{tier.pages:,}",
        _share(tier.hit_share),
        _rate(tier.pages_in_per_s),
        _rate(tier.pages_out_per_s),
    ]


def _bar(share: float, width: int, view: View) -> Text:
    """Full only where all is used, empty only where nothing is."""
    filled = max(1, min(width, int(share * width))) if share > 0 else 0
    full, empty = ("█", "░") if view.unicode else ("#", ".")
    return Text.assemble((full * filled, "cyan"), (empty * (width - filled), "dim"))


def _traffic(frame: Frame, history: History, view: View) -> Iterator[Text]:
    columns = [
        _Column("a second", 17, 0, right=False),
        _Column("calls", 7, 2),
        _Column("pages", 7, 0),
        _Column("bytes", 9, 1),
    ]
    taken = sum(column.width + _GAP for column in columns)
    width = min(KEPT, view.columns - taken)
    curved = view.unicode and width >= _LEAST_CURVE and frame.interval_s is not None
    if curved:
        columns.append(_Column(f"last {format_duration(width * view.every_s)}", width, 9, False))
    rows: list[list[str | Text]] = []
    for flow in frame.flows:
        moved = "" if flow.name == "lookups" else _size_rate(flow.bytes_per_s)
        calls = "" if flow.calls_per_s is None and frame.interval_s else _rate(flow.calls_per_s)
        curve = [_curve(history.curve(flow.name), width)] if curved else []
        rows.append([flow.name, calls, _rate(flow.pages_per_s), moved, *curve])
    yield from _table(columns, rows, view)


def _curve(rates: Sequence[float | None], width: int) -> Text:
    """The newest at the right end; each against the highest that is shown."""
    shown = rates[-width:]
    most = max((rate for rate in shown if rate), default=0.0)
    heights = "".join(
        " " if rate is None else _CURVE[round(rate / most * 7) if most else 0] for rate in shown
    )
    return Text(heights.rjust(width), "cyan")


def _hit_rate(frame: Frame) -> str:
    if frame.hit_rate_run is None:
        return "no lookups yet"
    now = "no lookups" if frame.hit_rate is None else f"{frame.hit_rate:.1%} of the pages asked for"
    return f"{now} now, {frame.hit_rate_run:.1%} since the start"


def _right_now(frame: Frame, view: View) -> Iterator[Text]:
    health = {tier.name: tier.health for tier in frame.tiers}
    clients, work = frame.clients, frame.underway
    figures = [
        (_Column("clients", 7, 0), f"{clients.sessions:,}"),
        (_Column("pinned", 7, 3), f"{clients.pins:,}"),
        (_Column("filling", 7, 1), f"{work.reserved_slots:,}"),
    ]
    if health.get("nvme", "off") != "off":
        figures += [
            (_Column("to write", 8, 2), format_size(work.queued_bytes)),
            (_Column("reading", 7, 4), f"{work.reads_in_flight:,}"),
            (_Column("to dram", 7, 5), f"{work.promotions_in_flight:,}"),
        ]
    if health.get("hbm", "off") != "off":
        figures.append((_Column("to hbm", 6, 6), f"{work.hbm_queued_pages:,}"))
    if work.remote_puts is not None:
        figures.append((_Column("to put", 6, 11), f"{work.remote_puts:,}"))
    if work.remote_gets is not None:
        figures.append((_Column("to get", 6, 10), f"{work.remote_gets:,}"))
    remote = _Column("remote", 9, 7)
    figures.append((remote, f"{clients.streams:,} of {clients.streams_max:,}"))
    if clients.connections_max:
        figures.append((_Column("connected", 9, 9), f"{clients.connections:,}"))
    columns = [_Column("right now", 9, 8, right=False)]
    row: list[str | Text] = [""]
    for column, figure in figures:
        columns.append(column)
        row.append(figure)
    yield from _table(columns, [row], view)


def _losses(losses: Iterable[LossLine], view: View) -> Iterator[Text]:
    columns = (
        _Column("not done", 17, 0, right=False),
        _Column("why", 20, 0, right=False),
        _Column("a second", 8, 1),
        _Column("since start", 13, 2),
    )
    rows: list[list[str | Text]] = [
        [loss.what, Text(_printable(loss.reason), "yellow"), _rate(loss.per_s), f"{loss.total:,}"]
        for loss in losses
    ]
    if rows:
        yield Text()
        yield from _table(columns, rows, view)


def _namespaces(spaces: Sequence[NamespaceLine], view: View) -> Iterator[Text]:
    if not spaces:
        return
    others = (_Column("pages", 10, 3), _Column("dram", 9, 1), _Column("nvme", 9, 1))
    id_column = _Column("namespace", 12, 2, right=False)
    taken = sum(column.width + _GAP for column in (id_column, *others))
    width = min(max(view.columns - taken, _LEAST_MODEL), _MOST_MODEL)
    columns = (_Column("model", width, 0, right=False), id_column, *others)
    rows = [
        [
            _printable(each.model),
            each.id[:12],
            f"{each.pages:,}",
            _size(each.dram_bytes),
            _size(each.nvme_bytes),
        ]
        for each in spaces[:_NAMESPACES]
    ]
    yield Text()
    yield from _table(columns, rows, view)
    if (more := len(spaces) - _NAMESPACES) > 0:
        yield Text(f"and {more:,} more: kvwarehouse ls", "dim")


# --- a table, and figures


def _table(
    columns: Sequence[_Column], rows: Iterable[Sequence[str | Text]], view: View
) -> Iterator[Text]:
    """Columns are as wide as they say, whatever is in them, so that nothing moves."""
    shown = _that_fit(columns, view.columns)
    titles = [Text(columns[place].title, "bold") for place in shown]
    yield _row(columns, shown, titles)
    for row in rows:
        yield _row(columns, shown, [row[place] for place in shown])


def _that_fit(columns: Sequence[_Column], width: int) -> list[int]:
    """Places of the columns that fit side by side; the first always."""
    shown = list(range(len(columns)))
    while len(shown) > 1 and sum(columns[at].width + _GAP for at in shown) - _GAP > width:
        shown.remove(max(shown, key=lambda at: (columns[at].rank, at)))
    return shown


def _row(columns: Sequence[_Column], shown: Sequence[int], cells: Sequence[str | Text]) -> Text:
    line = Text()
    for place, cell in zip(shown, cells, strict=True):
        column = columns[place]
        text = cell if isinstance(cell, Text) else Text(cell)
        text = _cut(text, column.width)
        gap = " " * (column.width - text.cell_len)
        line.append(" " * _GAP if line else "")
        line.append_text(Text.assemble(gap, text) if column.right else Text.assemble(text, gap))
    return line


def _cut(text: Text, width: int) -> Text:
    if text.cell_len <= width:
        return text
    return Text(set_cell_size(text.plain, width - 3) + "...", text.style)


def _printable(text: str) -> str:
    """Text from outside moves no cursor and rings no bell."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _rate(per_s: float | None) -> str:
    """At most 6 characters: "0", "3.2", "812", "4,012", "45.1k", "1.2M"."""
    if per_s is None:
        return "-"
    if per_s < 9.95:
        return f"{per_s:.1f}" if per_s >= 0.05 else ("0" if per_s == 0 else "<0.1")
    for unit, bound in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if per_s < 9_999.5 and unit == "k":
            return f"{per_s:,.0f}"
        if per_s < 999.95 * bound:
            return f"{per_s / bound:.1f}{unit}"
    return f"{per_s / 1e12:.1f}T"


def _size_rate(per_s: float | None) -> str:
    return "-" if per_s is None else format_size(per_s)


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"

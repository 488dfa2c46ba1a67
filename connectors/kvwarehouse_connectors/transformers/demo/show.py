"""The demo's findings for people: each row as it is finished, then what they mean."""

from __future__ import annotations

from rich.bar import Bar
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from kvwarehouse_connectors.transformers.demo.outcome import Cell, Machine, Outcome, Row
from kvwarehouse_connectors.transformers.demo.pace import ANSWER_TOKENS, RUNS, UNIT_TOKENS, Pace

PIPE_COLUMNS = 100
_INTRODUCTION = """\
A document was read once, to answer somebody's question. Now another question is asked about it. \
Seconds to the first token of the answer, when the model computes the whole prompt again, and when \
the document's KV is loaded from the warehouse and only the rest is computed:"""
_NAMES = {
    "computed": "computed",
    "dram": "DRAM",
    "dram_after_kill": "after kill -9",
    "nvme": "NVMe",
}
_WIDTHS = (7, 7, 9, 14, 14, 14, 12)
_HEADS = ("prompt", "reused", *_NAMES.values(), "same logits")
_LONGEST_BAR = 48
_COLUMNS_BESIDE_THE_BAR = 34
_JUSTIFIED: tuple[JustifyMethod, ...] = ("left", "left", "right", "right")
_SHORT_S = 0.1
"""Below it, figures have one digit more."""
_COLOURS = {"computed": "yellow"}
_LOADED_COLOUR = "green"


def machine_line(machine: Machine, pace: Pace) -> str:
    """How fast, and whether other work is in the way."""
    busy = (
        ". It is busy with other work: times are longer and vary more than on a quiet one"
        if machine.busy
        else ""
    )
    return (
        f"machine   {UNIT_TOKENS / pace.unit_s:,.0f} tokens/s on {machine.cores} cores, load"
        f" average {machine.load:.1f}{busy}"
    )


class Findings:
    """Prints to `out`, in at most 80 columns on a terminal of 80. Not thread-safe."""

    def __init__(self, out: Console) -> None:
        self._out = out

    def introduce(self) -> None:
        self._print("", _INTRODUCTION, "")
        if not self._out.is_terminal:
            self._line(_HEADS)

    def row(self, row: Row) -> None:
        """A block with a bar for each column, or a line where there is no terminal."""
        if not self._out.is_terminal:
            self._line(_cells(row))
            return
        same = "the same logits" if row.logits_equal else "DIFFERENT LOGITS"
        self._print(
            f"{row.prompt_tokens:,} tokens, {row.expected_tokens:,} of them reused: {same}",
            self._bars(row),
            "",
        )

    def close(self, outcome: Outcome) -> None:
        """What the rows mean, and what is wrong with them."""
        if not self._out.is_terminal:
            self._print("")
        if any(row.slower for row in outcome.rows):
            self._print(_why_not_faster(outcome.machine), "")
        self._print(_remarks(outcome))
        for fault in outcome.faults:
            self._out.print(f"FAULT     {fault}", style="bold red", highlight=False, markup=False)

    def _bars(self, row: Row) -> Table:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for justify in _JUSTIFIED:
            grid.add_column(justify=justify)
        width = min(_LONGEST_BAR, self._out.width - _COLUMNS_BESIDE_THE_BAR)
        cells = {"computed": row.computed, **row.loaded}
        longest_s = max(cell.first_token_s for cell in cells.values())
        for way, cell in cells.items():
            share = cell.first_token_s / longest_s
            times = "" if way == "computed" else f"{_times(row.computed, cell)}x"
            bar = self._bar(share, max(width, 1), _COLOURS.get(way, _LOADED_COLOUR))
            grid.add_row(f"  {_NAMES[way]}", bar, f"{_seconds(cell)} s", times)
        return grid

    def _bar(self, share: float, width: int, colour: str) -> RenderableType:
        if self._out.options.ascii_only:
            return Text("#" * max(1, round(share * width)), style=colour)
        return Bar(1.0, 0.0, share, width=width, color=colour)

    def _line(self, cells: tuple[str, ...]) -> None:
        padded = [cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)]
        self._print("  ".join(padded))

    def _print(self, *parts: RenderableType) -> None:
        for part in parts:
            self._out.print(part, highlight=False, markup=False)


def _cells(row: Row) -> tuple[str, ...]:
    loaded = [f"{_seconds(cell)} ({_times(row.computed, cell)}x)" for cell in row.loaded.values()]
    return (
        f"{row.prompt_tokens:,}",
        f"{row.expected_tokens:,}",
        _seconds(row.computed),
        *loaded,
        "yes" if row.logits_equal else "NO",
    )


def _seconds(cell: Cell) -> str:
    return f"{cell.first_token_s:.{2 if cell.first_token_s >= _SHORT_S else 3}f}"


def _times(computed: Cell, loaded: Cell) -> str:
    times = computed.first_token_s / loaded.first_token_s
    return f"{times:.{1 if times < 10 else 0}f}"


def _why_not_faster(machine: Machine) -> str:
    return (
        "A row that is not faster means one of two things. The prompt is short, and a short prompt"
        " is computed about as fast as anything else can be done. Or the machine is busy with other"
        f" work, which slows one measurement more than the next (load average {machine.load:.1f} on"
        f" {machine.cores} cores when the demo began)."
    )


def _remarks(outcome: Outcome) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    pace = outcome.pace
    remarks = {
        "columns": "computed: the model computes the whole prompt. DRAM: the document is loaded"
        " from memory. after kill -9: from memory as a killed daemon left it. NVMe: from disk,"
        f" with the memory tier deleted. {_runs(outcome)}",
        "same": _sameness(outcome),
        "control": _control(outcome),
        "hit rate": f"{outcome.pages_hit / outcome.pages_asked:.0%} of {outcome.pages_asked:,}"
        f" pages asked ({outcome.page_tokens} tokens, {outcome.page_bytes / 1e6:.2f} MB each)",
        "moved": f"{outcome.pages_stored * outcome.page_bytes / 1e6:,.0f} MB stored once,"
        f" {outcome.bytes_loaded / 1e6:,.0f} MB loaded and verified",
        "grid": f"{pace.chunk_tokens} tokens: what makes bits comparable. {UNIT_TOKENS} tokens take"
        f" {pace.unit_s:.2f} s on it, {pace.piece_s:.2f} s in one piece",
    }
    if outcome.random_weights:
        remarks["weights"] = (
            "random, so the answers are noise; what counts is that they are the same noise"
            " (--model PATH for words)"
        )
    remarks["time"] = f"{outcome.total_s:,.0f} s in all"
    for name, text in remarks.items():
        grid.add_row(name, text)
    return grid


def _runs(outcome: Outcome) -> str:
    text = f"Each figure is the better of {RUNS} runs, made in turns"
    once = [f"{row.prompt_tokens:,}" for row in outcome.rows if row.runs < RUNS]
    return f"{text}, but for {' and '.join(once)} tokens: one run" if once else text


def _sameness(outcome: Outcome) -> str:
    def found(equal: bool) -> str:
        return "too" if equal else "are NOT"

    logits_equal = all(row.logits_equal for row in outcome.rows)
    bytes_equal = all(row.bytes_equal for row in outcome.rows)
    answers_equal = all(row.answers_equal for row in outcome.rows)
    return (
        f"logits {'are equal' if logits_equal else 'are NOT equal'} bit for bit in all runs of all"
        f" four columns; the KV bytes {found(bytes_equal)}, the {ANSWER_TOKENS}-token answers"
        f" {found(answers_equal)}"
    )


def _control(outcome: Outcome) -> str:
    control = outcome.control
    place = control.first_different_token
    return (
        f"one page of the {control.prompt_tokens:,}-token prompt zeroed after loading: the answer "
        + (f"changed, at token {place}" if place else "did NOT change")
    )

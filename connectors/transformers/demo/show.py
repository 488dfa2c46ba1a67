"""The demo's findings for people."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from kvwarehouse_connectors.transformers.demo.outcome import Outcome, Row
from kvwarehouse_connectors.transformers.demo.pace import ANSWER_TOKENS
from kvwarehouse_connectors.transformers.demo.sample import Sample

_PIPE_COLUMNS = 100
_INTRODUCTION = """\
A document was read once, to answer somebody's question. Now another question is asked about it: \
with the whole prompt computed again, and with the document's KV loaded from the warehouse."""


def show(outcome: Outcome) -> None:
    """Prints to stdout; fits 80 columns."""
    out = Console(
        width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False, markup=False
    )
    for part in ("", _INTRODUCTION, "", _table(outcome), "", _remarks(outcome)):
        out.print(part)
    for fault in outcome.faults:
        out.print(f"FAULT     {fault}", style="bold red")


def _table(outcome: Outcome) -> Table:
    table = Table(
        title="seconds to the first token of the answer (how many times faster)",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in ("prompt", "reused", "computed", "DRAM", "after kill -9", "NVMe", "same logits"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in outcome.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    loaded = [_faster(row.computed, sample) for sample in row.loaded.values()]
    return [
        f"{row.prompt_tokens:,}",
        f"{row.expected_tokens:,}",
        f"{row.computed.first_token_s:.2f}",
        *loaded,
        "yes" if row.logits_equal else "NO",
    ]


def _faster(computed: Sample, loaded: Sample) -> str:
    times = computed.first_token_s / loaded.first_token_s
    return f"{loaded.first_token_s:.2f} ({times:.{1 if times < 10 else 0}f}x)"


def _remarks(outcome: Outcome) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    pace = outcome.pace
    remarks = {
        "columns": "tokens of the prompt, and of them reused; computed: all of it by the model;"
        " then loaded and the rest computed: from DRAM, from the DRAM tier as a killed daemon left"
        " it, from NVMe with the DRAM tier deleted",
        "same": _sameness(outcome),
        "control": _control(outcome),
        "hit rate": f"{outcome.pages_hit / outcome.pages_asked:.0%} of {outcome.pages_asked:,}"
        f" pages asked ({outcome.page_tokens} tokens, {outcome.page_bytes / 1e6:.2f} MB each)",
        "moved": f"{outcome.pages_stored * outcome.page_bytes / 1e6:,.0f} MB stored once,"
        f" {outcome.bytes_loaded / 1e6:,.0f} MB loaded and verified",
        "grid": f"{pace.chunk_tokens} tokens: what makes bits comparable. 512 tokens take"
        f" {pace.unit_s:.2f} s on it, {pace.piece_s:.2f} s in one piece",
    }
    if outcome.random_weights:
        remarks["weights"] = (
            "random, so the answers are noise; what counts is that they are the same noise"
            " (--model PATH for words)"
        )
    for name, text in remarks.items():
        grid.add_row(name, text)
    return grid


def _sameness(outcome: Outcome) -> str:
    bytes_equal = all(row.bytes_equal for row in outcome.rows)
    answers_equal = all(row.answers_equal for row in outcome.rows)
    return (
        "logits bit for bit in all four columns; the KV bytes"
        f" {'too' if bytes_equal else 'are NOT'}, the {ANSWER_TOKENS}-token answers"
        f" {'too' if answers_equal else 'are NOT'}"
    )


def _control(outcome: Outcome) -> str:
    control = outcome.control
    place = control.first_different_token
    return (
        f"one page of the {control.prompt_tokens:,}-token prompt zeroed after loading: the answer "
        + (f"changed, at token {place}" if place else "did NOT change")
    )

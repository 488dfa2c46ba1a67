"""The demo's findings for people."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from kvwarehouse_connectors.transformers.demo.outcome import Outcome, Row
from kvwarehouse_connectors.transformers.demo.pace import ANSWER_TOKENS
from kvwarehouse_connectors.transformers.demo.sample import Sample

_PIPE_COLUMNS = 120
_COLUMNS = (
    "prompt",
    "reused",
    "computed",
    "DRAM",
    "after kill -9",
    "NVMe",
    "same logits",
    "same KV",
)
_INTRODUCTION = (
    "One document was read once, to answer somebody's question. Then another question was asked"
    " about it:",
    "with the whole prompt computed again, and with the document's KV loaded from a warehouse.",
)


def show(outcome: Outcome) -> None:
    """Prints to stdout."""
    out = Console(
        width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False, markup=False
    )
    out.print()
    for line in _INTRODUCTION:
        out.print(line)
    out.print()
    out.print(_table(outcome))
    out.print()
    for line in _remarks(outcome):
        out.print(line)
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
    for column in _COLUMNS:
        table.add_column(column, justify="right")
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
        "yes" if row.bytes_equal else "NO",
    ]


def _faster(computed: Sample, loaded: Sample) -> str:
    times = computed.first_token_s / loaded.first_token_s
    return f"{loaded.first_token_s:.2f} ({times:.1f}x)"


def _remarks(outcome: Outcome) -> list[str]:
    control = outcome.control
    same_answers = all(row.answers_equal for row in outcome.rows)
    place = control.first_different_token
    changed = f"its answer changed at token {place}" if place else "its answer did NOT change"
    lines = [
        "columns   prompt and reused are in tokens; computed: all of the prompt by the model; the"
        " others: what is reused is\n          loaded, the rest computed; after kill -9: the"
        " DRAM tier as the killed daemon left it; NVMe: the DRAM tier deleted",
        f"same      bit for bit, on the same grid of chunks, in all four columns; the"
        f" {ANSWER_TOKENS}-token answers {'too' if same_answers else 'are NOT the same'}",
        f"control   one page of {outcome.page_tokens} tokens zeroed in the"
        f" {control.prompt_tokens:,}-token prompt: {changed}",
        f"hit rate  {outcome.pages_hit / outcome.pages_asked:.0%} of"
        f" {outcome.pages_asked:,} pages asked",
        f"moved     {_megabytes(outcome.pages_stored * outcome.page_bytes)} stored once,"
        f" {_megabytes(outcome.bytes_loaded)} loaded and verified",
        f"grid      chunks of {outcome.pace.chunk_tokens} tokens; 512 tokens take"
        f" {outcome.pace.unit_s:.2f} s so, and {outcome.pace.piece_s:.2f} s in one piece",
    ]
    if outcome.random_weights:
        lines.append(
            "weights   random, so the answers are noise: what counts is that they are the same"
            " noise (--model PATH for words)"
        )
    return lines


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"

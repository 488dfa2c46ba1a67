"""What bench/vllm_handoff.py found, as tables, a plot and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.vllm.pair import END_TO_END, HANDOFF, NO_HANDOFF, PREFIX_CACHE, STORED, WAYS
from kvwarehouse_bench.vllm.results import TtftResults

_RATIOS = (
    (NO_HANDOFF, HANDOFF),
    (HANDOFF, STORED),
    (HANDOFF, PREFIX_CACHE),
    (END_TO_END, NO_HANDOFF),
)
_NOTES = (
    "Medians over rounds, with the middle half of them in brackets. A ratio is the median of the"
    " rounds' own ratios: both sides of it ran within the same round.",
    "Times are the engines' own, one after the other; what a proxy and HTTP add to both sides is"
    " not in them.",
    "One engine works at a time; but for a second after its last step the prefill engine's worker"
    " looks for work without sleeping, beside the decode engine's load on this one machine: that"
    f" is in `{HANDOFF}` and not in `{STORED}`.",
)


def handoff_report(found: TtftResults, outcomes: Mapping[str, int]) -> Report:
    """outcomes: of the records, as the decode engine's connector counted them."""
    return Report(
        title="Prefill and decode in two engines",
        summary=_summary(found),
        blocks=[
            TableBlock("conditions", ("", ""), [*found.conditions.items()]),
            _times(found),
            _compared(found),
            _ended(outcomes),
            _plot(found),
        ],
        figures=_figures(found, outcomes),
        notes=_NOTES,
    )


def tokens_per_s(found: TtftResults, tokens: int) -> float:
    """Of prefill on the decode engine alone."""
    return (tokens + found.tail_tokens) / found.spread(NO_HANDOFF, tokens).median


def _summary(found: TtftResults) -> str:
    longest = found.lengths[-1]
    return (
        f"A prompt of {longest:,} tokens: its first token comes from the decode engine"
        f" {found.ratio(NO_HANDOFF, HANDOFF, longest).median:.1f} times as fast with a hand-off as"
        " when that engine computes it; with the prefill engine's time it takes"
        f" {found.ratio(END_TO_END, NO_HANDOFF, longest).median:.2f} times as long."
    )


def _times(found: TtftResults) -> TableBlock:
    rows = [
        [f"{n:,}", *_moved(found, n), *(found.cell(way, n) for way in WAYS)] for n in found.lengths
    ]
    return TableBlock(
        "time to first token, ms",
        ("tokens", ">tokens/s", ">KV", ">plain copy", *(f">{way}" for way in WAYS)),
        rows,
        "tokens/s: of the prompt without hand-off. Plain copy: of its KV, by one thread at"
        f" {found.copy_bytes_per_s / 1e9:.1f} GB/s. A share after a time: so much of the prompt"
        " came that way, the rest was computed.",
    )


def _moved(found: TtftResults, tokens: int) -> list[str]:
    """How fast such a prompt is computed, how much KV it has, and how long a plain copy takes."""
    copy_s = found.copy_s(tokens)
    kv = format_size(round(copy_s * found.copy_bytes_per_s))
    return [f"{tokens_per_s(found, tokens):,.0f}", kv, f"{copy_s * 1e3:.1f}"]


def _compared(found: TtftResults) -> TableBlock:
    rows = [
        [f"{n:,}", *(f"{found.ratio(*pair, n):.2f}" for pair in _RATIOS)] for n in found.lengths
    ]
    return TableBlock(
        "ratios", ("tokens", *(f">{over} / {under}" for over, under in _RATIOS)), rows
    )


def _ended(outcomes: Mapping[str, int]) -> TableBlock:
    rows = [[name, count] for name, count in sorted(outcomes.items())]
    return TableBlock(
        "hand-off records, as the decode engine counted them",
        ("outcome", ">records"),
        rows,
        "waits: its pages were not all there when the request came, and it waited for them.",
    )


def _plot(found: TtftResults) -> Plot:
    lines = [
        Series(way, [(n, found.spread(way, n).median * 1e3) for n in found.lengths])
        for way in (NO_HANDOFF, END_TO_END, HANDOFF, PREFIX_CACHE)
    ]
    return Plot(
        "Time to first token", "prompt, tokens", "ms, median", lines, log_x=True, log_y=True
    )


def _figures(found: TtftResults, outcomes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "conditions": found.conditions,
        "outcomes": dict(outcomes),
        "copy_bytes_per_s": found.copy_bytes_per_s,
        "lengths": [
            {
                "tokens": tokens,
                "copy_s": found.copy_s(tokens),
                "computed_tokens_per_s": tokens_per_s(found, tokens),
                "ttft_s": {way: found.seconds(way, tokens) for way in WAYS},
                "share": {way: [s.share for s in found.samples[way][tokens]] for way in WAYS},
                "ratios": {
                    f"{over} / {under}": vars(found.ratio(over, under, tokens))
                    for over, under in _RATIOS
                },
            }
            for tokens in found.lengths
        ],
    }

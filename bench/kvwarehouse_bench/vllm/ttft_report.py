"""What bench/vllm_ttft.py found, as tables, a plot and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.vllm.contenders import (
    DRAM,
    NVME,
    PEER_FILES,
    PEER_MEMORY,
    PEER_PREFIX_CACHE,
    PEER_RECOMPUTED,
    PREFIX_CACHE,
    RECOMPUTED,
)
from kvwarehouse_bench.vllm.results import TtftResults

_SHOWN = (RECOMPUTED, PREFIX_CACHE, DRAM, NVME, PEER_MEMORY, PEER_FILES)
_RATIOS = (
    (RECOMPUTED, DRAM),
    (RECOMPUTED, NVME),
    (DRAM, PREFIX_CACHE),
    (NVME, PEER_FILES),
    (DRAM, PEER_MEMORY),
    (PEER_MEMORY, PEER_PREFIX_CACHE),
    (RECOMPUTED, PEER_RECOMPUTED),
)
_BEYOND = (
    (DRAM, PREFIX_CACHE),
    (NVME, PREFIX_CACHE),
    (PEER_MEMORY, PEER_PREFIX_CACHE),
    (PEER_FILES, PEER_PREFIX_CACHE),
)
_NOTES = (
    "Medians over rounds, with the middle half of them in brackets. A ratio is the median of the"
    " rounds' own ratios: both sides of it ran within the same round.",
    "recomputed / peer recomputed compares like with like: how far it is from 1 says how far the"
    " other ratios between the engines can be trusted.",
    "The peer's copies between the engine's cache and its memory are the bench's own: vLLM ships"
    " them for GPUs only. Its memory is emptied before each read of files.",
    "The warehouse verifies every page that it loads; the peer's tiers have no checksums.",
)


def ttft_report(found: TtftResults) -> Report:
    ways = [way for way in _SHOWN if way in found.samples]
    compared = [pair for pair in _RATIOS if set(pair) <= set(found.samples)]
    return Report(
        title="Time to first token with vLLM",
        summary=_summary(found),
        blocks=[
            TableBlock("conditions", ("", ""), [*found.conditions.items()]),
            _times(found, ways),
            _compared(found, compared),
            _beyond(found),
            _plot(found, ways),
        ],
        figures=_figures(found, compared),
        notes=_NOTES,
    )


def _summary(found: TtftResults) -> str:
    longest = found.lengths[-1]
    return (
        f"A prompt of {longest:,} tokens: {found.ratio(RECOMPUTED, DRAM, longest).median:.1f} times"
        f" as fast from the warehouse's DRAM as recomputed,"
        f" {found.ratio(RECOMPUTED, NVME, longest).median:.1f} times from its NVMe."
    )


def _times(found: TtftResults, ways: Sequence[str]) -> TableBlock:
    rows = [[f"{tokens:,}", *(found.cell(way, tokens) for way in ways)] for tokens in found.lengths]
    return TableBlock(
        "time to first token, ms",
        ("tokens", *(f">{way}" for way in ways)),
        rows,
        "A share after a time: so much of the prompt came that way, the rest was computed.",
    )


def _compared(found: TtftResults, pairs: Sequence[tuple[str, str]]) -> TableBlock:
    rows = [
        [f"{tokens:,}", *(f"{found.ratio(*pair, tokens):.2f}" for pair in pairs)]
        for tokens in found.lengths
    ]
    return TableBlock("ratios", ("tokens", *(f">{over} / {under}" for over, under in pairs)), rows)


def _beyond(found: TtftResults) -> TableBlock:
    """What a hit costs beyond a prefix cache hit, which moves nothing, in the same engine and
    round, beside a plain copy: how fast the engine computes falls out."""
    pairs = [pair for pair in _BEYOND if set(pair) <= set(found.samples)]
    rows = []
    for tokens in found.lengths:
        copy_s = found.copy_s(tokens)
        moved = round(copy_s * found.copy_bytes_per_s)
        times = [found.beyond(*pair, tokens) for pair in pairs]
        cells = [f"{1e3 * time.median:.1f}" for time in times]
        over_copy = f"{times[0].median / copy_s:.1f}"
        rows.append([f"{tokens:,}", format_size(moved), f"{copy_s * 1e3:.1f}", *cells, over_copy])
    return TableBlock(
        "a hit beyond a prefix cache hit of the same engine, ms",
        ("tokens", ">KV", ">plain copy", *(f">{way}" for way, _ in pairs), f">{DRAM} / copy"),
        rows,
        "The limit is this machine's memory: a streaming copy by one thread,"
        f" {found.copy_bytes_per_s / 1e9:.1f} GB/s.",
    )


def _plot(found: TtftResults, ways: Sequence[str]) -> Plot:
    lines = [
        Series(way, [(n, found.spread(way, n).median * 1e3) for n in found.lengths]) for way in ways
    ]
    return Plot(
        "Time to first token", "prompt, tokens", "ms, median", lines, log_x=True, log_y=True
    )


def _figures(found: TtftResults, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "conditions": found.conditions,
        "copy_bytes_per_s": found.copy_bytes_per_s,
        "lengths": [_of_length(found, pairs, tokens) for tokens in found.lengths],
    }


def _of_length(found: TtftResults, pairs: Sequence[tuple[str, str]], tokens: int) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "copy_s": found.copy_s(tokens),
        "ttft_s": {way: found.seconds(way, tokens) for way in found.samples},
        "share": {way: [s.share for s in found.samples[way][tokens]] for way in found.samples},
        "beyond_s": {
            way: vars(found.beyond(way, least, tokens))
            for way, least in _BEYOND
            if {way, least} <= set(found.samples)
        },
        "ratios": {
            f"{over} / {under}": vars(found.ratio(over, under, tokens)) for over, under in pairs
        },
    }

"""A replay as tables, plots and figures. Stateless; thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvwarehouse.planning.interval import Estimate
from kvwarehouse.planning.replay import WRITE_AMPLIFICATION, FirstTokens, ReplayRun, ReplaySetup
from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size
from kvwarehouse.trace.trace import Trace

Curve = tuple[ReplaySetup, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class ReplayAnswer:
    """`run` is what was asked for, `unbounded` the same without its write budget, if it has one;
    `others` and `curves` are there where they were asked for too. `page_bytes` None: not known,
    figures are in pages."""

    run: ReplayRun
    unbounded: ReplayRun | None = None
    others: Sequence[ReplayRun] = ()
    curves: Sequence[Curve] = ()
    page_bytes: int | None = None
    times: Sequence[FirstTokens] = ()
    times_assume: str = ""


def replay_report(answer: ReplayAnswer) -> Report:
    run = answer.run
    blocks: list[TableBlock | Plot] = [_trace(run.trace), _hits(answer)]
    if not run.setup.is_optimum:
        blocks.append(_written(answer))
    if answer.unbounded:
        blocks.append(_budget(run, answer.unbounded))
    if answer.others:
        blocks.append(_others(answer.others))
    if answer.times:
        blocks.append(_times(answer))
    if answer.curves:
        blocks += [_sweep(answer.curves), _plot(answer.curves)]
    summary = (
        f"{run.hit_rate:.1%} of {run.trace.asked:,} pages hit in prefix order, with"
        f" {_described(run.setup)}."
    )
    return Report(f"Replay of {run.trace.name}", summary, blocks, _figures(answer), _notes(answer))


def _described(setup: ReplaySetup) -> str:
    dram = "endless DRAM" if setup.dram_pages is None else f"{setup.dram_pages:,} pages of DRAM"
    nvme = f" and {setup.nvme_pages:,} of NVMe" if setup.nvme_pages else ""
    return f"{dram}{nvme}, {_policy(setup)}"


def _policy(setup: ReplaySetup) -> str:
    return f"{setup.policy}, {'which knows the future' if setup.is_optimum else _order(setup)}"


def _trace(trace: Trace) -> TableBlock:
    rows: list[tuple[str, Any]] = [
        ("format", trace.format),
        ("requests", trace.requests),
        ("over", f"{trace.span_s:,.0f} s"),
        ("pages asked", trace.asked),
        ("different pages", trace.ids),
        ("tokens a page", trace.block_tokens),
        ("mean input tokens", int(trace.input_tokens.mean())),
        ("mean output tokens", int(trace.output_tokens.mean())),
    ]
    if trace.skipped:
        rows.append(("bad lines skipped", trace.skipped))
    return TableBlock("Trace", ("what", ">value"), rows, "; ".join(trace.complaints))


def _hits(answer: ReplayAnswer) -> TableBlock:
    run = answer.run
    rows = [("dram", int(run.dram_hits.sum()), f"{run.tier_rate('dram'):.1%}")]
    if run.setup.nvme_pages:
        rows.append(("nvme", int(run.nvme_hits.sum()), f"{run.tier_rate('nvme'):.1%}"))
    rows.append(("computed", run.trace.asked - run.hits, f"{1 - run.hit_rate:.1%}"))
    rows.append(("asked", run.trace.asked, "100.0%"))
    return TableBlock("Where pages came from", ("from", ">pages", ">share"), rows)


def _written(answer: ReplayAnswer) -> TableBlock:
    run = answer.run
    rows = []
    for tier, counts in (("dram", run.dram), ("nvme", run.nvme)):
        if tier == "nvme" and not run.setup.nvme_pages:
            continue
        written = counts["written"]
        size = format_size(written * answer.page_bytes) if answer.page_bytes else ""
        daily = run.nvme_writes_per_day if tier == "nvme" else None
        rows.append(
            (
                tier,
                written,
                size,
                counts["evicted"],
                counts["refused"],
                "" if daily is None else f"{daily:.3g} to {daily * WRITE_AMPLIFICATION:.3g}",
            )
        )
    return TableBlock(
        "Written",
        ("tier", ">pages written", ">bytes", ">evicted", ">refused", ">drive writes a day"),
        rows,
    )


def _budget(run: ReplayRun, unbounded: ReplayRun) -> TableBlock:
    """Drive writes beyond what the budget allows are those of its first half day."""
    rows = [
        (
            name,
            f"{each.hit_rate:.2%}",
            each.nvme["written"],
            "" if each.nvme_writes_per_day is None else f"{each.nvme_writes_per_day:.3g}",
            each.nvme["spared"],
        )
        for name, each in (("with", run), ("without", unbounded))
    ]
    return TableBlock(
        "What the write budget costs",
        ("budget", ">hits", ">pages written", ">drive writes a day", ">not written for it"),
        rows,
        "Half a day's worth is there at the start, as in the middle of a drive's life: a trace of"
        " less than a day or two says little.",
    )


def _others(others: Sequence[ReplayRun]) -> TableBlock:
    most = max(run.hit_rate for run in others)
    rows = [
        (
            run.setup.policy,
            _order(run.setup),
            f"{run.hit_rate:.2%}",
            f"{run.hit_rate / most:.0%}" if most else "",
            "" if run.setup.is_optimum else _pages_written(run),
        )
        for run in others
    ]
    return TableBlock(
        "Policies compared",
        ("policy", "order", ">hits", ">of the most possible", ">pages written"),
        rows,
        "opt knows the future: no policy can hit more.",
    )


def _order(setup: ReplaySetup) -> str:
    if setup.is_optimum:
        return "any"
    return "leaves first" if setup.leaves_first else "page by page"


def _pages_written(run: ReplayRun) -> int:
    return (run.nvme if run.setup.nvme_pages else run.dram)["written"]


def _times(answer: ReplayAnswer) -> TableBlock:
    rows = [
        (
            each.name,
            f"{each.loaded.value:.3g}",
            f"{each.loaded.low:.3g} to {each.loaded.high:.3g}",
            f"{each.recomputed.value:.3g}",
            f"{each.recomputed.low:.3g} to {each.recomputed.high:.3g}",
        )
        for each in answer.times
    ]
    return TableBlock(
        "Predicted time to first token, seconds",
        ("", ">with tiers", ">range", ">recomputed", ">range "),
        rows,
        answer.times_assume,
    )


def _sweep(curves: Sequence[Curve]) -> TableBlock:
    sizes = [pages for pages, _ in curves[0][1]]
    rows = [
        (pages, *(f"{points[at][1]:.1%}" for _, points in curves)) for at, pages in enumerate(sizes)
    ]
    columns = [">DRAM pages", *(f">{_policy(setup)}" for setup, _ in curves)]
    return TableBlock("Hit rate by size", columns, rows)


def _plot(curves: Sequence[Curve]) -> Plot:
    series = [
        Series(_policy(setup), [(pages, 1 - rate) for pages, rate in points])
        for setup, points in curves
    ]
    return Plot("Miss-ratio curve", "DRAM pages", "miss ratio", series, log_x=True)


def _notes(answer: ReplayAnswer) -> list[str]:
    notes = [
        "All blocks of a request are used at its arrival, root first; KV of answers is not reused.",
        "Page by page is how published figures are computed, leaves first how the daemon evicts.",
    ]
    if answer.run.setup.is_optimum:
        notes.append(
            "opt is Belady's: it knows the future, and keeps only what is asked for again. No"
            " policy hits more."
        )
    elif answer.run.setup.nvme_pages:
        notes.append(
            "NVMe is evicted page by page here; the log reclaims whole segments and may write up to"
            " a third more."
        )
    return notes


# --- figures for programs -------------------------------------------------------------------------


def _figures(answer: ReplayAnswer) -> dict[str, Any]:
    run, trace = answer.run, answer.run.trace
    figures: dict[str, Any] = {
        **_run_figures(run),
        "asked": trace.asked,
        "hits": run.hits,
        "misses": trace.asked - run.hits,
        "tiers": {tier: _tier_figures(answer, tier) for tier in ("dram", "nvme")},
        "page_bytes": answer.page_bytes,
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "requests": trace.requests,
            "different_pages": trace.ids,
            "block_tokens": trace.block_tokens,
            "span_s": trace.span_s,
        },
        "skipped": trace.skipped,
        "complaints": list(trace.complaints),
        "notes": _notes(answer),
    }
    if answer.unbounded:
        figures["write_budget"] = {
            "pages_per_day": run.setup.nvme_pages_per_day,
            "hit_rate_without": answer.unbounded.hit_rate,
            "pages_written_without": answer.unbounded.nvme["written"],
        }
    if answer.others:
        figures["compared"] = [_run_figures(each) for each in answer.others]
    if answer.times:
        figures["first_token_seconds"] = {
            each.name: {
                "loaded": Estimate("", each.loaded, "s", answer.times_assume).figures(),
                "recomputed": Estimate("", each.recomputed, "s", answer.times_assume).figures(),
            }
            for each in answer.times
        }
    if answer.curves:
        figures["sweep"] = [
            {
                "policy": setup.policy,
                "order": setup.order,
                "points": [{"dram_pages": pages, "hit_rate": rate} for pages, rate in points],
            }
            for setup, points in answer.curves
        ]
    return figures


def _run_figures(run: ReplayRun) -> dict[str, Any]:
    return {
        "hit_rate": run.hit_rate,
        "policy": run.setup.policy,
        "order": run.setup.order,
        "dram_pages": run.setup.dram_pages,
        "nvme_pages": run.setup.nvme_pages,
    }


def _tier_figures(answer: ReplayAnswer, tier: str) -> dict[str, Any]:
    run = answer.run
    hits, counts = (run.dram_hits, run.dram) if tier == "dram" else (run.nvme_hits, run.nvme)
    figures: dict[str, Any] = {
        "hits": int(hits.sum()),
        "hit_rate": run.tier_rate(tier),
        **{f"pages_{name}": count for name, count in counts.items()},
        "bytes_written": counts["written"] * answer.page_bytes if answer.page_bytes else None,
    }
    if tier == "nvme":
        figures["drive_writes_per_day"] = run.nvme_writes_per_day
    return figures

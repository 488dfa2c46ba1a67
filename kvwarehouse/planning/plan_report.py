"""A plan as tables, a plot and figures. Stateless; thread-safe."""

from __future__ import annotations

import math
from typing import Any

from kvwarehouse.planning.disaggregation import advice_of
from kvwarehouse.planning.interval import Estimate, Quantity
from kvwarehouse.planning.plan import Plan
from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size

_NETWORKS_GBIT = (25.0, 100.0, 200.0, 400.0)
_PLOT_TOKENS = (128, 512, 2_048, 8_192, 32_768, 131_072)
_LOAD_ASSUMES = "the hit is loaded first, then the rest is computed; windows load only their span"


def plan_report(plan: Plan) -> Report:
    load = plan.workload
    summary = (
        f"{load.requests_per_s:g} requests/s of {load.prompt_tokens:,} + {load.output_tokens:,}"
        f" tokens, {load.reuse:.0%} of the prompt reused, on {plan.gpus} x {plan.gpu.name},"
        f" {plan.footprint.bytes_per_token:,} bytes of KV per token"
        f" ({plan.footprint.dtype.name})."
    )
    blocks: list[TableBlock | Plot] = [
        _estimates("The engine", list(_engine(plan).values())),
        _first_token(plan),
        _plot(plan),
        _break_even(plan),
        _stores(plan),
        _handoff(plan),
        _checks(plan),
        _estimates("What reuse saves", list(plan.savings.values())),
    ]
    name = plan.footprint.model.name
    return Report(f"Plan for {name}", summary, blocks, _figures(plan), _notes(plan))


def _engine(plan: Plan) -> dict[str, Estimate]:
    tokens = plan.workload.prompt_tokens
    both = f"{plan.prefill.assumption}; {plan.decode.assumption}"
    mean = f"requests at their mean rate; {plan.prefill.assumption}"
    return {
        "prefill_tokens_per_s": Estimate(
            f"prefill at {tokens:,} tokens",
            plan.prefill.tokens_per_s(tokens),
            "tokens/s",
            plan.prefill.assumption,
        ),
        "recompute_seconds": Estimate(
            "time to first token, recomputed",
            plan.recompute_seconds,
            "s",
            f"no queue before it; {plan.prefill.assumption}",
        ),
        "decode_seconds_per_token": Estimate(
            "time per output token", plan.decode.token_s, "s", plan.decode.assumption
        ),
        "prefill_share": Estimate(
            "share of a request's time in prefill", plan.prefill_share, "", both
        ),
        "prefill_load": Estimate(
            "GPU time that prefill takes, nothing reused", plan.prefill_load, "of all", mean
        ),
        "prefill_load_with_reuse": Estimate(
            "GPU time that prefill takes, with reuse", plan.prefill_load_with_reuse, "of all", mean
        ),
    }


def _estimates(title: str, estimates: list[Estimate]) -> TableBlock:
    rows = [
        (each.name, _number(each.amount.value), _range(each.amount), each.unit, each.assumption)
        for each in estimates
    ]
    return TableBlock(title, ("what", ">value", ">range", "unit", "assumption"), rows)


def _first_token(plan: Plan) -> TableBlock:
    recompute = plan.recompute_seconds
    rows = [
        ("recompute", _number(recompute.value), _range(recompute), "1", plan.prefill.assumption)
    ]
    for tier in plan.tiers:
        loaded = plan.first_token(tier)
        ratio = f"{recompute.value / loaded.value:.2f}"
        rows.append((f"{tier.name}", _number(loaded.value), _range(loaded), ratio, tier.assumption))
    return TableBlock(
        "Time to first token",
        ("from", ">seconds", ">range", ">times faster", "assumption"),
        rows,
        f"{plan.workload.hit_tokens:,} of {plan.workload.prompt_tokens:,} tokens are loaded:"
        f" {_LOAD_ASSUMES}.",
    )


def _plot(plan: Plan) -> Plot:
    series = [
        Series("recompute", [(t, plan.prefill.seconds(t).value) for t in _PLOT_TOKENS]),
        *(
            Series(
                f"{plan.workload.reuse:.0%} from {tier.name}",
                [(t, plan.first_token(tier, t).value) for t in _PLOT_TOKENS],
            )
            for tier in plan.tiers
        ),
    ]
    return Plot(
        "Time to first token by prompt length",
        "prompt tokens",
        "seconds",
        series,
        log_x=True,
        log_y=True,
    )


def _break_even(plan: Plan) -> TableBlock:
    rows = []
    for tier in plan.tiers:
        found = plan.break_even(tier)
        if found is None:
            rows.append((tier.name, "never", "", "loading is slower at every length"))
        else:
            rows.append((tier.name, _number(found.value), _range(found), "shortest prefix"))
    return TableBlock(
        "Break-even: the prefix from which loading is faster than computing",
        ("tier", ">tokens", ">range", ""),
        rows,
    )


def _stores(plan: Plan) -> TableBlock:
    rows = []
    for tier in plan.tiers:
        rate = plan.store_rate(tier)
        rows.append(
            (
                tier.name,
                f"{format_size(rate.mean_bytes_per_s)}/s",
                rate.keeps_up_on_average,
                f"{format_size(rate.peak_bytes_per_s.value)}/s",
                rate.keeps_up_at_peak,
                f"{format_size(rate.write.value)}/s",
            )
        )
    return TableBlock(
        "Does write-behind keep up?",
        ("tier", ">mean", "keeps up", ">prefill without pause", "keeps up", ">writes"),
        rows,
        "Every new page is stored once. Behind a tier that does not keep up pages are refused,"
        " newest first: prefill never waits.",
    )


def _handoff(plan: Plan) -> TableBlock:
    rows = [
        (f"{gbit:g} Gb/s", f"{found.value * 1e3:,.0f} ms", f"{found.high * 1e3:,.0f} ms")
        for gbit, found in ((each, plan.handoff_seconds(each)) for each in _gbits(plan))
    ]
    return TableBlock(
        "Hand-off from prefill to decode",
        ("network", ">at line rate", ">at 70 % of it"),
        rows,
        f"{plan.handoff_bytes / 1e9:,.2f} GB for {plan.workload.prompt_tokens:,} tokens of prompt.",
    )


def _gbits(plan: Plan) -> list[float]:
    return sorted({*_NETWORKS_GBIT, plan.network.gbit})


def _checks(plan: Plan) -> TableBlock:
    rows = [(check.name, check.found, check.verdict, check.rule) for check in plan.checks]
    return TableBlock(
        "Separate prefill and decode?",
        ("check", "found", "speaks", "rule"),
        rows,
        f"Advice: {advice_of(plan.checks)}.",
    )


def _notes(plan: Plan) -> list[str]:
    notes = [
        "Ranges hold every result that the assumptions' ranges allow; they are not statistics.",
        "One request at a time: queues come on top of both ways to the first token.",
    ]
    if plan.prefill_load_with_reuse.value > 1:
        notes.append(
            f"Prefill alone needs {plan.prefill_load_with_reuse.value:.1f} times these GPUs even"
            " with reuse: requests will queue without end."
        )
    return notes


def _number(value: float) -> str:
    if math.isinf(value):
        return "never"
    if value == 0 or 1e-3 <= abs(value) < 1e15:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.2e}"


def _range(amount: Quantity) -> str:
    return f"{_number(amount.low)} to {_number(amount.high)}"


# --- figures for programs -------------------------------------------------------------------------


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.footprint.model.name,
        "dtype": plan.footprint.dtype.name,
        "bytes_per_token": plan.footprint.bytes_per_token,
        "gpu": plan.gpu.name,
        "gpus": plan.gpus,
        "hit_tokens": plan.workload.hit_tokens,
        "engine": {name: each.figures() for name, each in _engine(plan).items()},
        "tiers": [_tier_figures(plan, at) for at in range(len(plan.tiers))],
        "handoff": {
            "tokens": plan.workload.prompt_tokens,
            "bytes": plan.handoff_bytes,
            "seconds": {f"{gbit:g}": plan.handoff_seconds(gbit).value for gbit in _gbits(plan)},
            "assumption": "line rate; at worst 70 % of it",
        },
        "separate": {
            "advice": advice_of(plan.checks),
            "checks": [
                {
                    "name": check.name,
                    "found": check.found,
                    "verdict": check.verdict,
                    "rule": check.rule,
                }
                for check in plan.checks
            ],
        },
        "savings": {name: each.figures() for name, each in plan.savings.items()},
        "notes": _notes(plan),
    }


def _tier_figures(plan: Plan, at: int) -> dict[str, Any]:
    tier = plan.tiers[at]
    rate = plan.store_rate(tier)
    break_even = plan.break_even(tier)
    assumption = f"{tier.assumption}; {_LOAD_ASSUMES}"
    return {
        "tier": tier.name,
        "first_token_seconds": Estimate("", plan.first_token(tier), "s", assumption).figures(),
        "break_even_tokens": None if break_even is None else _bounded(break_even, assumption),
        "store": {
            "mean_bytes_per_s": rate.mean_bytes_per_s,
            "peak_bytes_per_s": rate.peak_bytes_per_s.value,
            "write_bytes_per_s": rate.write.value,
            "keeps_up_on_average": rate.keeps_up_on_average,
            "keeps_up_at_peak": rate.keeps_up_at_peak,
        },
    }


def _bounded(amount: Quantity, assumption: str) -> dict[str, Any]:
    """JSON has no infinity: null stands for never."""
    figures = Estimate("", amount, "tokens", assumption).figures()
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in figures.items()
    }

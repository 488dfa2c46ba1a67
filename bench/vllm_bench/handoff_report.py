"""What bench/vllm_handoff.py found, as tables, a plot and figures."""

from __future__ import annotations

from kvwarehouse.planner.report import Plot, Report, Series, TableBlock
from vllm_bench.handed import ALONE_WAY, BOTH, HANDED, PREFILL, STORED
from vllm_bench.ttft_report import Found

_WAYS = (ALONE_WAY, HANDED, STORED, PREFILL, BOTH)
_RATIOS = ((ALONE_WAY, HANDED), (HANDED, STORED), (BOTH, ALONE_WAY))
_NOTES = (
    "Medians over rounds, with the middle half of them in brackets. A ratio is the median of the"
    " rounds' own ratios.",
    "Both engines run on the same cores: the prefill engine's worker looks for work without"
    " sleeping for a second after its last step, beside the decode engine's load.",
)


def handoff_report(found: Found) -> Report:
    longest = found.lengths[-1]
    return Report(
        title="Prefill and decode in two engines",
        summary=f"A prompt of {longest:,} tokens that was handed over has its first token on the"
        f" decode engine {found.ratio(ALONE_WAY, HANDED, longest).median:.1f} times as fast as when"
        " that engine computes it.",
        blocks=[
            TableBlock("conditions", ("", ""), [*found.conditions.items()]),
            _times(found),
            _compared(found),
            Plot(
                "Time to first token on the decode engine",
                "prompt, tokens",
                "ms, median",
                [
                    Series(way, [(n, found.spread(way, n).median * 1e3) for n in found.lengths])
                    for way in (ALONE_WAY, HANDED, STORED)
                ],
                log_x=True,
                log_y=True,
            ),
        ],
        figures={
            "conditions": found.conditions,
            "lengths": [
                {
                    "tokens": tokens,
                    "seconds": {way: found.seconds(way, tokens) for way in _WAYS},
                    "share": {way: found.share(way, tokens) for way in _WAYS},
                    "ratios": {
                        f"{over} / {under}": vars(found.ratio(over, under, tokens))
                        for over, under in _RATIOS
                    },
                }
                for tokens in found.lengths
            ],
        },
        notes=_NOTES,
    )


def _times(found: Found) -> TableBlock:
    rows = [[f"{n:,}", *(_cell(found, way, n) for way in _WAYS)] for n in found.lengths]
    return TableBlock(
        "time to first token, ms",
        ("tokens", *(f">{way}" for way in _WAYS)),
        rows,
        "A share after a time: so much of the prompt came that way, the rest was computed.",
    )


def _cell(found: Found, way: str, tokens: int) -> str:
    spread = found.spread(way, tokens)
    low, high = spread.low * 1e3, spread.high * 1e3
    share = found.share(way, tokens)
    partly = "" if share > 0.999 else f" {share:.0%}"
    return f"{spread.median * 1e3:,.1f} ({low:,.0f} to {high:,.0f}){partly}"


def _compared(found: Found) -> TableBlock:
    rows = [
        [f"{n:,}", *(f"{found.ratio(*pair, n):.2f}" for pair in _RATIOS)] for n in found.lengths
    ]
    names = (f">{over} / {under}" for over, under in _RATIOS)
    return TableBlock("ratios", ("tokens", *names), rows)

"""Whether to compute prompts and answers on separate GPUs: five checks, and the hand-off's time.

Stateless; thread-safe. The thresholds are rules of thumb of the field, not laws; each check says
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvwarehouse.planning.interval import Quantity, quantity

Verdict = Literal["for", "against", "open"]

LITTLE_DECODE, MUCH_DECODE = 0.70, 0.85
LARGE_HANDOFF_BYTES = 500e6
FAST_NETWORK_GBIT = 100.0
MUCH_REUSE = 0.80
FEW_GPUS, MANY_GPUS = 16, 32

# Line rate that transfers reach at worst; at best all of it, as published figures have it.
_WIRE_PART = 0.7


def handoff_seconds(kv_bytes: float, network_gbit: float) -> Quantity:
    """Of one request's KV over the network; the value is at line rate."""
    at_line_rate = kv_bytes * 8 / (network_gbit * 1e9)
    return Quantity(at_line_rate, at_line_rate, at_line_rate / _WIRE_PART)


@dataclass(frozen=True)
class Situation:
    decode_share: Quantity
    handoff_bytes: float
    hit_rate: float
    gpus: int
    steady: bool
    network_gbit: float
    rdma: bool


@dataclass(frozen=True)
class Check:
    name: str
    found: str
    verdict: Verdict
    rule: str


def checks_of(situation: Situation) -> list[Check]:
    return [
        _decode_share(situation.decode_share),
        _handed_over(situation),
        _hit_rate(situation.hit_rate),
        _gpus(situation),
        _network(situation),
    ]


def advice_of(checks: Sequence[Check]) -> str:
    against = [check.name for check in checks if check.verdict == "against"]
    undecided = [check.name for check in checks if check.verdict == "open"]
    if against:
        return f"keep prefill and decode together ({', '.join(against)})"
    if undecided:
        return f"measure before you separate them ({', '.join(undecided)})"
    return "separate prefill and decode"


def _decode_share(share: Quantity) -> Check:
    verdict: Verdict = "open"
    if share.value < LITTLE_DECODE:
        verdict = "against"
    elif share.value > MUCH_DECODE:
        verdict = "for"
    return Check(
        "decode's share of request time",
        f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})",
        verdict,
        f"under {LITTLE_DECODE:.0%} there is little to gain, over {MUCH_DECODE:.0%} much",
    )


def _handed_over(situation: Situation) -> Check:
    large = situation.handoff_bytes > LARGE_HANDOFF_BYTES
    fits = not large or situation.network_gbit >= FAST_NETWORK_GBIT
    return Check(
        "bytes handed over per request",
        f"{situation.handoff_bytes / 1e6:,.0f} MB",
        "for" if fits else "against",
        f"above {LARGE_HANDOFF_BYTES / 1e6:.0f} MB it needs {FAST_NETWORK_GBIT:.0f} Gb/s",
    )


def _hit_rate(hit_rate: float) -> Check:
    return Check(
        "prefix hit rate",
        f"{hit_rate:.0%}",
        "against" if hit_rate > MUCH_REUSE else "for",
        f"above {MUCH_REUSE:.0%} a separate prefill pool loses its worth",
    )


def _gpus(situation: Situation) -> Check:
    verdict: Verdict = "open"
    if situation.gpus < FEW_GPUS:
        verdict = "against"
    elif situation.gpus > MANY_GPUS and situation.steady:
        verdict = "for"
    traffic = "steady" if situation.steady else "unsteady"
    return Check(
        "GPUs",
        f"{situation.gpus:,}, {traffic} traffic",
        verdict,
        f"under {FEW_GPUS} no; above {MANY_GPUS} with steady traffic yes",
    )


def _network(situation: Situation) -> Check:
    fast = situation.rdma or situation.network_gbit >= FAST_NETWORK_GBIT
    return Check(
        "network",
        f"{situation.network_gbit:g} Gb/s{', RDMA' if situation.rdma else ''}",
        "for" if fast else "against",
        f"RDMA or at least {FAST_NETWORK_GBIT:.0f} Gb/s",
    )


def share_of_second(first: Quantity, second: Quantity) -> Quantity:
    """second / (first + second), each standing once: no range wider than it is."""
    ratio = first / second.at_least(1e-12)
    return Quantity(1 / (1 + ratio.value), 1 / (1 + ratio.high), 1 / (1 + ratio.low))


def share_of_first(first: Quantity, second: Quantity) -> Quantity:
    """first / (first + second)."""
    other = share_of_second(first, second)
    return quantity(1.0) - other

"""Load or recompute: time to first token from each tier, and the prompt from which loading wins.

Stateless; thread-safe. What is loaded is what a context holds (windows keep only their span).
"""

from __future__ import annotations

from kvwarehouse.model.footprint import Footprint
from kvwarehouse.planning.compute import Prefill
from kvwarehouse.planning.hardware import TierSpeed
from kvwarehouse.planning.interval import Quantity, quantity

LONGEST_BREAK_EVEN = 10_000_000
_GROWTH = 1.05


def load_seconds(footprint: Footprint, tier: TierSpeed, tokens: int) -> Quantity:
    """From the lookup to the last byte in the GPU."""
    if tokens == 0:
        return quantity(0.0)
    return tier.latency_s + quantity(footprint.context_bytes(tokens)) / tier.read


def first_token_seconds(
    prefill: Prefill, footprint: Footprint, tier: TierSpeed, *, tokens: int, hit_tokens: int
) -> Quantity:
    """Loading `hit_tokens` and then computing the rest, one after the other."""
    return load_seconds(footprint, tier, hit_tokens) + prefill.seconds(tokens, hit_tokens)


def break_even_tokens(prefill: Prefill, footprint: Footprint, tier: TierSpeed) -> Quantity | None:
    """The shortest prefix that loads as fast as it computes; infinite where the range says that it
    never does, None where even the best case never does."""
    best = _first_win(prefill, footprint, tier, "best")
    if best is None:
        return None
    value = _first_win(prefill, footprint, tier, "value")
    worst = _first_win(prefill, footprint, tier, "worst")
    never = float("inf")
    return Quantity(never if value is None else value, best, never if worst is None else worst)


def _first_win(prefill: Prefill, footprint: Footprint, tier: TierSpeed, case: str) -> int | None:
    def wins(tokens: int) -> bool:
        compute = prefill.seconds(tokens)
        load = load_seconds(footprint, tier, tokens)
        if case == "best":
            return load.low <= compute.high
        return load.high <= compute.low if case == "worst" else load.value <= compute.value

    below, tokens = 0, 1
    while not wins(tokens):
        if tokens >= LONGEST_BREAK_EVEN:
            return None
        below, tokens = tokens, min(LONGEST_BREAK_EVEN, max(tokens + 1, int(tokens * _GROWTH)))
    while tokens - below > 1:
        middle = (below + tokens) // 2
        below, tokens = (below, middle) if wins(middle) else (middle, tokens)
    return tokens

"""The answers of `kvwarehouse plan`, as estimates: what a service asks of its engine, and what
reuse saves of GPU time, energy and money. Nothing here prints. Immutable; thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvwarehouse.errors import UsageError
from kvwarehouse.model.footprint import Footprint
from kvwarehouse.planning.disaggregation import (
    Check,
    Situation,
    checks_of,
    handoff_seconds,
    share_of_first,
    share_of_second,
)
from kvwarehouse.planning.hardware import Gpu, TierSpeed
from kvwarehouse.planning.interval import Estimate, Quantity, quantity
from kvwarehouse.planning.latency import Decode, Prefill, break_even_tokens, first_token_seconds

LONGEST_PROMPT = 100_000_000

SECONDS_PER_DAY = 86_400

# Part of its board power that a GPU draws in prefill, and what cooling and conversion add.
_POWER_PART = Quantity(0.85, 0.6, 1.0)
_FACILITY = Quantity(1.3, 1.1, 1.6)


@dataclass(frozen=True)
class ServiceLoad:
    """Means over requests. `reuse` is the part of a prompt that is stored already, 0 to 1: at least
    one token is always computed, for its logits. `steady`: the rate hardly changes over the day."""

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    reuse: float
    steady: bool = False

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if not 1 <= value <= LONGEST_PROMPT:
                raise UsageError(
                    f"{name} of {value} tokens cannot be; use 1 to {LONGEST_PROMPT:,}",
                    code="bad_workload",
                )
        if not (self.requests_per_s > 0 and math.isfinite(self.requests_per_s)):
            raise UsageError(
                f"{self.requests_per_s:g} requests a second is no load; use a positive rate",
                code="bad_workload",
            )
        if not 0 <= self.reuse <= 1:
            raise UsageError(
                f"a reuse of {self.reuse:g} cannot be; use 0 to 1 (0.6 for 60 %)",
                code="bad_workload",
            )

    @property
    def hit_tokens(self) -> int:
        return min(int(self.prompt_tokens * self.reuse), self.prompt_tokens - 1)

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens


@dataclass(frozen=True)
class Prices:
    """In one currency, whichever."""

    gpu_hour: Quantity
    kwh: Quantity
    assumption: str


def savings(
    workload: ServiceLoad, prefill: Prefill, gpu: Gpu, gpus: int, prices: Prices
) -> dict[str, Estimate]:
    """Per day. The GPUs compute for others while a prefix loads, so loading costs them nothing."""
    tokens, cached = workload.prompt_tokens, workload.hit_tokens
    # Linear and quadratic part of the cached tokens alone: what is no longer computed.
    each = prefill.seconds(cached)
    gpu_hours = each * (workload.requests_per_s * SECONDS_PER_DAY * gpus / 3600)
    kwh = gpu_hours * _POWER_PART * _FACILITY * (gpu.watts / 1000)
    load = (
        f"{workload.requests_per_s:g} requests/s, {cached:,} of {tokens:,} tokens reused, day long"
    )
    return {
        "gpu_hours_per_day": Estimate(
            "GPU-hours saved a day", gpu_hours, "h", f"{load}; {prefill.assumption}"
        ),
        "energy_kwh_per_day": Estimate(
            "energy saved a day",
            kwh,
            "kWh",
            f"{_POWER_PART.value:.0%} ({_POWER_PART.low:.0%} to {_POWER_PART.high:.0%}) of"
            f" {gpu.watts:g} W a GPU, {_FACILITY.value:g} ({_FACILITY.low:g} to"
            f" {_FACILITY.high:g}) for the facility",
        ),
        "gpu_money_per_day": Estimate(
            "GPU time saved a day, in money", gpu_hours * prices.gpu_hour, "", prices.assumption
        ),
        "energy_money_per_day": Estimate(
            "energy saved a day, in money (part of rented GPUs' price)",
            kwh * prices.kwh,
            "",
            prices.assumption,
        ),
    }


@dataclass(frozen=True)
class Network:
    """Between a prefill and a decode pool."""

    gbit: float = 100.0
    rdma: bool = False


@dataclass(frozen=True)
class StoreRate:
    """Whether a tier's writes keep up with what prefill makes: at the workload's mean rate, and
    while prefill runs without a pause."""

    tier: str
    mean_bytes_per_s: float
    peak_bytes_per_s: Quantity
    write: Quantity

    @property
    def keeps_up_on_average(self) -> str:
        return _verdict(quantity(self.mean_bytes_per_s), self.write)

    @property
    def keeps_up_at_peak(self) -> str:
        return _verdict(self.peak_bytes_per_s, self.write)


def _verdict(needed: Quantity, given: Quantity) -> str:
    if needed.high <= given.low:
        return "yes"
    if needed.low > given.high:
        return "no"
    return "likely" if needed.value <= given.value else "unlikely"


@dataclass(frozen=True)
class Plan:
    """The question; the answers are computed when they are asked for."""

    footprint: Footprint
    workload: ServiceLoad
    gpu: Gpu
    gpus: int
    prefill: Prefill
    decode: Decode
    tiers: Sequence[TierSpeed]
    network: Network
    prices: Prices

    @cached_property
    def recompute_seconds(self) -> Quantity:
        return self.prefill.seconds(self.workload.prompt_tokens)

    def first_token(self, tier: TierSpeed, tokens: int | None = None) -> Quantity:
        """Time to first token with the workload's reuse, for a prompt of `tokens`."""
        prompt = self.workload.prompt_tokens if tokens is None else tokens
        hit = min(int(prompt * self.workload.reuse), prompt - 1)
        return first_token_seconds(
            self.prefill, self.footprint, tier, tokens=prompt, hit_tokens=hit
        )

    def break_even(self, tier: TierSpeed) -> Quantity | None:
        return break_even_tokens(self.prefill, self.footprint, tier)

    @cached_property
    def decode_seconds(self) -> Quantity:
        """Of the tokens after the first."""
        return self.decode.token_s * (self.workload.output_tokens - 1)

    @cached_property
    def prefill_share(self) -> Quantity:
        return share_of_first(self.recompute_seconds, self.decode_seconds)

    @cached_property
    def decode_share(self) -> Quantity:
        return share_of_second(self.recompute_seconds, self.decode_seconds)

    @cached_property
    def prefill_load(self) -> Quantity:
        """Part of the GPUs' time that prefill takes when nothing is reused; above 1 they cannot."""
        return self.recompute_seconds * self.workload.requests_per_s

    @cached_property
    def prefill_load_with_reuse(self) -> Quantity:
        tokens, cached = self.workload.prompt_tokens, self.workload.hit_tokens
        return self.prefill.seconds(tokens, cached) * self.workload.requests_per_s

    def store_rate(self, tier: TierSpeed) -> StoreRate:
        token_bytes = self.footprint.bytes_per_token
        mean = self.workload.requests_per_s * self.workload.new_tokens * token_bytes
        peak = self.prefill.tokens_per_s(self.workload.prompt_tokens) * token_bytes
        return StoreRate(tier.name, mean, peak, tier.write)

    @cached_property
    def handoff_bytes(self) -> int:
        return self.footprint.context_bytes(self.workload.prompt_tokens)

    def handoff_seconds(self, gbit: float) -> Quantity:
        return handoff_seconds(self.handoff_bytes, gbit)

    @cached_property
    def checks(self) -> list[Check]:
        return checks_of(
            Situation(
                self.decode_share,
                self.handoff_bytes,
                self.workload.reuse,
                self.gpus,
                self.workload.steady,
                self.network.gbit,
                self.network.rdma,
            )
        )

    @cached_property
    def savings(self) -> dict[str, Estimate]:
        return savings(self.workload, self.prefill, self.gpu, self.gpus, self.prices)

"""The answers of `kvwarehouse plan`, as estimates: nothing here prints. Stateless; thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvwarehouse.model.footprint import Footprint
from kvwarehouse.planning.compute import Decode, Prefill
from kvwarehouse.planning.cost import Prices, savings
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
from kvwarehouse.planning.ttft import break_even_tokens, first_token_seconds
from kvwarehouse.planning.workload import Workload


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
    workload: Workload
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

"""What fits: tokens and users in GPU memory, days of KV in the tiers.

Stateless; thread-safe. Answers carry their arithmetic as lines of text, because the published ones
are often wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvwarehouse.errors import UsageError
from kvwarehouse.model.footprint import Footprint

SECONDS_PER_DAY = 86_400
LONGEST_CONTEXT = 1_000_000_000


@dataclass(frozen=True)
class GpuFit:
    """Tokens of KV that GPU memory holds beside the weights, all users together and each."""

    memory_bytes: int
    weights_bytes: int
    free_bytes: int
    bytes_per_token: int
    tokens: int
    users: int
    tokens_per_user: int

    @property
    def arithmetic(self) -> list[str]:
        return [
            f"{self.memory_bytes:,} B of memory - {self.weights_bytes:,} B of weights"
            f" = {self.memory_bytes - self.weights_bytes:,} B",
            *self._reserved(),
            f"{self.free_bytes:,} B / {self.bytes_per_token:,} B per token"
            f" = {self.tokens:,} tokens",
            f"{self.tokens:,} tokens / {self.users:,} users = {self.tokens_per_user:,} tokens each",
        ]

    def _reserved(self) -> list[str]:
        reserved = self.memory_bytes - self.weights_bytes - self.free_bytes
        return [f"- {reserved:,} B in reserve = {self.free_bytes:,} B"] if reserved else []


def gpu_fit(
    memory_bytes: int,
    weights_bytes: int,
    bytes_per_token: int,
    *,
    users: int = 1,
    reserve_bytes: int = 0,
) -> GpuFit:
    """`bytes_per_token` over all ranks together. Raises UsageError where nothing is left."""
    free = memory_bytes - weights_bytes - reserve_bytes
    if users < 1:
        raise UsageError(f"{users} users cannot be served; use 1 or more", code="bad_users")
    if bytes_per_token < 1:
        raise UsageError(
            "the model keeps no KV per token (state-space layers only): any context fits",
            code="impossible_shape",
        )
    if free <= 0:
        raise UsageError(
            f"{weights_bytes:,} B of weights and {reserve_bytes:,} B in reserve leave nothing of"
            f" {memory_bytes:,} B of GPU memory; use more GPUs, or smaller weights",
            code="does_not_fit",
        )
    tokens = free // bytes_per_token
    return GpuFit(
        memory_bytes, weights_bytes, free, bytes_per_token, tokens, users, tokens // users
    )


def longest_context(footprint: Footprint, bytes_each: int) -> int:
    """Tokens of the longest context that `bytes_each` hold when windows and chunks keep only their
    span; 0 where not even the states fit. At most LONGEST_CONTEXT: a model of windows alone has no
    end."""
    low, high = 0, LONGEST_CONTEXT
    while low < high:
        middle = (low + high + 1) // 2
        if footprint.context_bytes(middle) <= bytes_each:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class PromptRate:
    """`reuse` is the part of a prompt's tokens that is stored already (0 to below 1)."""

    prompts_per_s: float
    prompt_tokens: int
    output_tokens: int = 0
    reuse: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompts_per_s > 0 or self.prompt_tokens < 1 or self.output_tokens < 0:
            raise UsageError(
                f"{self.prompts_per_s:g} prompts a second of {self.prompt_tokens} +"
                f" {self.output_tokens} tokens is no load; use a positive rate and length",
                code="bad_rate",
            )
        if not 0 <= self.reuse < 1:
            raise UsageError(
                f"a reuse of {self.reuse:g} cannot be; use 0 to below 1", code="bad_reuse"
            )

    @property
    def new_tokens_per_s(self) -> float:
        return self.prompts_per_s * (self.prompt_tokens * (1 - self.reuse) + self.output_tokens)


@dataclass(frozen=True)
class TierLife:
    """How long a page stays in a tier before it is the oldest and leaves."""

    tier: str
    capacity_bytes: int
    tokens: int
    seconds: float
    write_bytes_per_s: float

    @property
    def days(self) -> float:
        return self.seconds / SECONDS_PER_DAY

    @property
    def drive_writes_per_day(self) -> float:
        return self.write_bytes_per_s * SECONDS_PER_DAY / self.capacity_bytes


def tier_life(tier: str, capacity_bytes: int, bytes_per_token: int, rate: PromptRate) -> TierLife:
    """First in, first out: every new token is stored and none is kept for being used again, so a
    page that is used again (LRU) stays longer."""
    if capacity_bytes < 1:
        raise UsageError(f"a {tier} of {capacity_bytes} B holds nothing", code="bad_size")
    if bytes_per_token < 1:
        raise UsageError(
            "the model keeps no KV per token: tiers hold states, not pages", code="impossible_shape"
        )
    written = rate.new_tokens_per_s * bytes_per_token
    tokens = capacity_bytes // bytes_per_token
    return TierLife(tier, capacity_bytes, tokens, capacity_bytes / written, written)

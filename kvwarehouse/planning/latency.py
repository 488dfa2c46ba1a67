"""How long a model computes a prompt (prefill) and each further token (decode), and how long
loading takes instead: time to first token from each tier, and the prompt from which loading
wins.

Immutable; thread-safe. Prefill is bound by arithmetic, decode by memory: the first is estimated
from FLOPs and the second from bytes, unless measured rates are given. What is loaded is what a
context holds (windows keep only their span).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import Architecture
from kvwarehouse.model.footprint import Footprint
from kvwarehouse.planning.hardware import Gpu, TierSpeed
from kvwarehouse.planning.interval import Quantity, quantity, within

# Part of the data sheet's matrix rate that a prefill reaches, and of the memory rate that a decode
# step reaches: what engines report on large models, from badly to well tuned.
PREFILL_PART = Quantity(0.5, 0.3, 0.7)
DECODE_PART = Quantity(0.6, 0.4, 0.8)

# Of a measured rate: batches and lengths differ from run to run.
_MEASURED_SPREAD = 0.1
_WEIGHT_BYTES = 2
# Head dimensions of MLA while it computes a prompt: 128 + 64 of a key, 128 of a value.
_LATENT_DIMS = 192 + 128

LONGEST_BREAK_EVEN = 10_000_000
_GROWTH = 1.05


@dataclass(frozen=True)
class Prefill:
    """`token_s` per token, and `pair_s` per pair of a token and one before it."""

    token_s: Quantity
    pair_s: Quantity
    assumption: str

    def seconds(self, tokens: float, cached: float = 0) -> Quantity:
        """Of the last `tokens - cached` tokens of a prompt whose first `cached` are loaded."""
        pairs = (tokens * tokens - cached * cached) / 2
        return self.token_s * (tokens - cached) + self.pair_s * pairs

    def tokens_per_s(self, tokens: float) -> Quantity:
        return quantity(tokens) / self.seconds(tokens)


def measured_prefill(tokens_per_s: float) -> Prefill:
    _check_rate("prefill rate", tokens_per_s)
    return Prefill(
        within(1 / tokens_per_s, _MEASURED_SPREAD, _MEASURED_SPREAD),
        quantity(0.0),
        f"measured: {tokens_per_s:,.0f} tokens/s for all GPUs together at any length,"
        f" +-{_MEASURED_SPREAD:.0%}",
    )


def can_estimate_prefill(model: Architecture) -> bool:
    """What `estimated_prefill` needs is known of the model."""
    return bool(model.active_params and (model.attention_heads or not model.latent))


def estimated_prefill(model: Architecture, gpu: Gpu, gpus: int) -> Prefill:
    """2 FLOPs a parameter and token, 2 FLOPs a head dimension (of key and value) and pair. Raises
    UsageError for a model whose size or query heads are unknown."""
    if not model.active_params:
        raise UsageError(
            f"how many parameters {model.name} has is not known; give --prefill-tokens-per-s, or"
            " --params (and --active-params for a mixture of experts)",
            code="unknown_params",
        )
    heads = _query_heads(model)
    reached = PREFILL_PART * (gpu.flops * gpus)
    per_pair, per_token = 0.0, 2 * model.active_params
    for layer in model.attention:
        dims = _LATENT_DIMS if layer.latent else layer.key_dim + layer.value_dim
        flops = 2.0 * heads * dims
        if layer.span_tokens:
            per_token += flops * layer.span_tokens
        else:
            per_pair += flops / layer.row_tokens
    assumption = (
        f"estimated: 2 FLOPs for each of {model.active_params / 1e9:,.3g} B parameters and token,"
        f" attention over all pairs, {PREFILL_PART.value:.0%} ({PREFILL_PART.low:.0%} to"
        f" {PREFILL_PART.high:.0%}) of {gpus} x {gpu.flops / 1e12:,.0f} TFLOPS 16-bit"
    )
    if model.attention and not model.attention_heads:
        assumption += f"; {heads} query heads, as many as KV heads, where --heads is not given"
    return Prefill(quantity(per_token) / reached, quantity(per_pair) / reached, assumption)


def _query_heads(model: Architecture) -> int:
    """Of a layer of attention; 0 for a model without. Where they are unknown, as many as the KV
    heads is the least there can be; the one row of MLA says nothing of them."""
    if model.attention_heads:
        return model.attention_heads
    if model.latent:
        raise UsageError(
            f"how many query heads {model.name} has is not known; give --heads, or"
            " --prefill-tokens-per-s",
            code="unknown_heads",
        )
    return max((layer.kv_heads for layer in model.attention), default=0)


@dataclass(frozen=True)
class Decode:
    """Time of one further token of each request, and why."""

    token_s: Quantity
    assumption: str


def measured_decode(milliseconds: float) -> Decode:
    _check_rate("time per output token", milliseconds)
    token_s = within(milliseconds / 1000, _MEASURED_SPREAD, _MEASURED_SPREAD)
    return Decode(
        token_s, f"measured: {milliseconds:g} ms per output token, +-{_MEASURED_SPREAD:.0%}"
    )


@dataclass(frozen=True)
class DecodeStep:
    """What one step reads: the weights once and the KV of `batch` contexts."""

    footprint: Footprint
    gpu: Gpu
    gpus: int
    batch: int
    context_tokens: int


def estimated_decode(step: DecodeStep) -> Decode:
    """Of a mixture of experts a batch touches between one token's experts and all of them."""
    model = step.footprint.model
    if not model.active_params:
        raise UsageError(
            f"how many parameters {model.name} has is not known; give --decode-ms or --params",
            code="unknown_params",
        )
    few, most = model.active_params * _WEIGHT_BYTES, model.params * _WEIGHT_BYTES
    weights = Quantity(min(most, few * step.batch), few, most)
    kv = step.batch * step.footprint.context_bytes(step.context_tokens)
    reached = DECODE_PART * (step.gpu.memory_bytes_per_s * step.gpus)
    assumption = (
        f"estimated: one step reads 16-bit weights and the KV of {step.batch} contexts of"
        f" {step.context_tokens:,} tokens at {DECODE_PART.value:.0%} ({DECODE_PART.low:.0%} to"
        f" {DECODE_PART.high:.0%}) of {step.gpus} x {step.gpu.memory_bytes_per_s / 1e9:,.0f} GB/s"
    )
    return Decode((weights + kv) / reached, assumption)


def _check_rate(what: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"a {what} of {value:g} cannot be; use a positive one", code="bad_rate")


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

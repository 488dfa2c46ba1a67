"""The answer of `kvwarehouse size`: a model's KV per token and context, and what fits where: tokens
and users in GPU memory, days of KV in the tiers.

Stateless; thread-safe. Answers carry their arithmetic as lines of text, because the published ones
are often wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import Attention, Layer, StateSpace
from kvwarehouse.model.footprint import STATE_BYTES, Footprint, Sharding
from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size

SECONDS_PER_DAY = 86_400
LONGEST_CONTEXT = 1_000_000_000

DEFAULT_CONTEXTS = (1_000, 10_000, 100_000, 1_000_000)


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


@dataclass(frozen=True)
class SizeQuestion:
    footprint: Footprint
    sharding: Sharding = field(default_factory=Sharding)
    contexts: Sequence[int] = DEFAULT_CONTEXTS
    page_tokens: int = 256
    fit: GpuFit | None = None
    lives: Sequence[TierLife] = ()


def size_report(asked: SizeQuestion) -> Report:
    footprint = asked.footprint
    blocks: list[TableBlock | Plot] = [_per_token(asked), _layers(footprint), _contexts(asked)]
    blocks.append(_plot(asked))
    if asked.fit is not None:
        lines = [(line,) for line in _arithmetic(asked, asked.fit)]
        blocks.append(TableBlock("What fits on the GPUs", ("arithmetic",), lines))
    if asked.lives:
        blocks.append(_lives(asked.lives))
    summary = (
        f"{footprint.bytes_per_token:,} bytes of KV per token in {footprint.dtype.name}"
        f" ({footprint.dtype.describe()})."
    )
    return Report(
        f"KV of {footprint.model.name}", summary, blocks, _figures(asked), _notes(footprint)
    )


def _per_token(asked: SizeQuestion) -> TableBlock:
    footprint, sharding = asked.footprint, asked.sharding
    rows: list[tuple[str, int]] = [
        ("all attention layers full", footprint.bytes_per_token),
        ("  of it scales", footprint.scale_bytes_per_token),
    ]
    if _spans(footprint):
        rows.append(("once windows and chunks are full", footprint.growing_bytes_per_token))
    hidden = footprint.hidden_size_bytes_per_token
    if footprint.model.latent and hidden:
        rows.append(("uncompressed, keys and values of the hidden size", hidden))
    if (sharding.tp, sharding.pp) != (1, 1):
        rows += [
            (
                f"on the fullest rank (TP {sharding.tp}, PP {sharding.pp})",
                footprint.rank_bytes_per_token(sharding),
            ),
            ("on all ranks together", footprint.all_ranks_bytes_per_token(sharding)),
        ]
    rows.append(
        (
            f"a page of {asked.page_tokens:,} tokens",
            footprint.bytes_per_token * asked.page_tokens,
        )
    )
    return TableBlock("Bytes per token", ("what", ">bytes"), rows)


def _layers(footprint: Footprint) -> TableBlock:
    rows = [
        (count, _described(layer), _formula(layer, footprint))
        for layer, count in footprint.model.groups
    ]
    return TableBlock(
        "Layers", (">layers", "kind", "bytes of each"), rows, f"from {footprint.model.source}"
    )


def _described(layer: Layer) -> str:
    if isinstance(layer, StateSpace):
        return "state, one size for any context"
    if not isinstance(layer, Attention):
        return "keeps nothing of its own"
    reach = f"{layer.span} of {layer.span_tokens:,} tokens" if layer.span_tokens else "full"
    if layer.row_tokens > 1:
        reach = f"one row for {layer.row_tokens} tokens"
    beside = f"; {_described(layer.beside)}" if layer.beside else ""
    return f"{'latent (MLA)' if layer.latent else f'{layer.kv_heads} KV heads'}, {reach}{beside}"


def _formula(layer: Layer, footprint: Footprint) -> str:
    if isinstance(layer, StateSpace):
        return f"{layer.state_elements:,} x {STATE_BYTES} + {layer.conv_elements:,} x 2 a sequence"
    if not isinstance(layer, Attention):
        return "0"
    row = footprint.dtype.row_bytes
    dims = f"{row(layer.key_dim):,}"
    if layer.value_dim:
        dims = f"({row(layer.key_dim):,} key + {row(layer.value_dim):,} value)"
    fixed = f" + {layer.fixed_bytes} index" if layer.fixed_bytes else ""
    shared = f", / {layer.row_tokens}" if layer.row_tokens > 1 else ""
    beside = f"; {_formula(layer.beside, footprint)}" if layer.beside else ""
    each = footprint.layer_bytes(layer)
    return f"{layer.kv_heads} x {dims}{fixed}{shared} = {each:,} a token{beside}"


def _contexts(asked: SizeQuestion) -> TableBlock:
    rows = []
    for tokens in asked.contexts:
        full = asked.footprint.bytes_per_token * tokens
        held = asked.footprint.context_bytes(tokens)
        rows.append((tokens, full, format_size(full), held, format_size(held)))
    return TableBlock(
        "One context",
        (">tokens", ">all layers full", ">", ">really held", "> "),
        rows,
        "Really held: windows and chunks keep no more than their span; states are counted.",
    )


def _plot(asked: SizeQuestion) -> Plot:
    footprint = asked.footprint
    series = [
        Series("all layers full", [(t, footprint.bytes_per_token * t) for t in asked.contexts]),
        Series("really held", [(t, footprint.context_bytes(t)) for t in asked.contexts]),
    ]
    return Plot("KV of one context", "tokens", "bytes", series, log_x=True, log_y=True)


def _arithmetic(asked: SizeQuestion, fit: GpuFit) -> list[str]:
    footprint = asked.footprint
    counted = []
    if _spans(footprint):
        counted.append("windows and chunks at their span")
    if footprint.state_bytes:
        counted.append(f"{footprint.state_bytes:,} B of states for each user")
    if not counted:
        return fit.arithmetic
    states_fit = footprint.state_bytes <= _held_bytes(asked, fit)
    held = f"{_held_tokens(asked, fit):,} tokens each" if states_fit else "states do not fit"
    return [*fit.arithmetic, f"with {' and '.join(counted)}: {held}"]


def _spans(footprint: Footprint) -> bool:
    return footprint.growing_bytes_per_token != footprint.bytes_per_token


def _held_bytes(asked: SizeQuestion, fit: GpuFit) -> int:
    """Each user's share. What ranks repeat of a token is taken off it in proportion."""
    once, repeated = asked.footprint.bytes_per_token, fit.bytes_per_token
    return fit.free_bytes * once // (repeated * fit.users)


def _held_tokens(asked: SizeQuestion, fit: GpuFit) -> int:
    """Of each user's context."""
    return longest_context(asked.footprint, _held_bytes(asked, fit))


def _lives(lives: Sequence[TierLife]) -> TableBlock:
    rows = [
        (
            life.tier,
            format_size(life.capacity_bytes),
            life.tokens,
            f"{life.days:.3g}",
            f"{format_size(life.write_bytes_per_s)}/s",
            f"{life.drive_writes_per_day:.3g}",
        )
        for life in lives
    ]
    return TableBlock(
        "Time to live before eviction",
        ("tier", ">capacity", ">tokens", ">days", ">written", ">capacities a day"),
        rows,
        "Each new token is stored once; a page that is used again stays longer.",
    )


def _notes(footprint: Footprint) -> list[str]:
    notes = [f"KV in {footprint.dtype.name}: {footprint.dtype.describe()}."]
    if footprint.model.state:
        notes.append(
            f"Recurrent states are counted at {STATE_BYTES} bytes an element, convolution windows"
            " at 2: engines that keep states in 16 bits need half of it."
        )
    if footprint.model.latent:
        notes.append(
            "MLA keeps one latent row for all heads; the uncompressed figure is what is published,"
            " not what is stored. Each TP rank repeats the row."
        )
    return notes


# --- figures for programs -------------------------------------------------------------------------


def _figures(asked: SizeQuestion) -> dict[str, Any]:
    footprint, sharding = asked.footprint, asked.sharding
    hidden = footprint.hidden_size_bytes_per_token
    figures: dict[str, Any] = {
        "model": footprint.model.name,
        "source": footprint.model.source,
        "dtype": footprint.dtype.name,
        "dtype_means": footprint.dtype.describe(),
        "bytes_per_token": footprint.bytes_per_token,
        "payload_bytes_per_token": footprint.payload_bytes_per_token,
        "scale_bytes_per_token": footprint.scale_bytes_per_token,
        "growing_bytes_per_token": footprint.growing_bytes_per_token,
        "uncompressed_bytes_per_token": hidden if footprint.model.latent else None,
        "state_bytes": footprint.state_bytes,
        "page_tokens": asked.page_tokens,
        "page_bytes": footprint.bytes_per_token * asked.page_tokens,
        "tp": sharding.tp,
        "pp": sharding.pp,
        "rank_bytes_per_token": footprint.rank_bytes_per_token(sharding),
        "all_ranks_bytes_per_token": footprint.all_ranks_bytes_per_token(sharding),
        "layers": [
            {"layers": count, "kind": _described(layer), "bytes": _formula(layer, footprint)}
            for layer, count in footprint.model.groups
        ],
        "contexts": [
            {
                "tokens": tokens,
                "bytes": footprint.bytes_per_token * tokens,
                "held_bytes": footprint.context_bytes(tokens),
            }
            for tokens in asked.contexts
        ],
        "assumptions": _notes(footprint),
    }
    if asked.fit is not None:
        figures["fit"] = _fit_figures(asked, asked.fit)
    if asked.lives:
        figures["tiers"] = [_life_figures(life) for life in asked.lives]
    return figures


def _fit_figures(asked: SizeQuestion, fit: GpuFit) -> dict[str, Any]:
    return {
        "free_bytes": fit.free_bytes,
        "bytes_per_token": fit.bytes_per_token,
        "tokens": fit.tokens,
        "users": fit.users,
        "tokens_per_user": fit.tokens_per_user,
        "held_tokens_per_user": _held_tokens(asked, fit),
        "arithmetic": _arithmetic(asked, fit),
    }


def _life_figures(life: TierLife) -> dict[str, Any]:
    return {
        "tier": life.tier,
        "capacity_bytes": life.capacity_bytes,
        "tokens": life.tokens,
        "days": life.days,
        "write_bytes_per_s": life.write_bytes_per_s,
        "drive_writes_per_day": life.drive_writes_per_day,
    }

"""The answer of `kvwarehouse size`: a model's KV per token and context, and what fits where.

Stateless; thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvwarehouse.model.architecture import Attention, Layer, StateSpace
from kvwarehouse.model.footprint import STATE_BYTES, Footprint, Sharding
from kvwarehouse.planning.fit import GpuFit, TierLife, longest_context
from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size

DEFAULT_CONTEXTS = (1_000, 10_000, 100_000, 1_000_000)


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
    if layer.latent:
        return "latent (MLA), full"
    reach = f"{layer.span} of {layer.span_tokens:,} tokens" if layer.span_tokens else "full"
    return f"{layer.kv_heads} KV heads, {reach}"


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
    return f"{layer.kv_heads} x {dims}{fixed} = {footprint.layer_bytes(layer):,} a token"


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
    lines = fit.arithmetic
    if _spans(asked.footprint):
        lines.append(
            f"with windows and chunks at their span: {_held_tokens(asked, fit):,} tokens each"
        )
    return lines


def _spans(footprint: Footprint) -> bool:
    return footprint.growing_bytes_per_token != footprint.bytes_per_token


def _held_tokens(asked: SizeQuestion, fit: GpuFit) -> int:
    """Of each user's context. What ranks repeat of a token is taken off its share in proportion."""
    once, repeated = asked.footprint.bytes_per_token, fit.bytes_per_token
    return longest_context(asked.footprint, fit.free_bytes * once // (repeated * fit.users))


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

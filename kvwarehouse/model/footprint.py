"""How many bytes of KV a model keeps: per token, for a context, on one rank.

Stateless; thread-safe. docs/sizing.md has the formulas. Two figures matter apart: `bytes_per_token`
counts every attention layer as if it looked back over everything, as is published; `context_bytes`
counts what windows, chunks and states really hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import Architecture, Attention, Layer, StateSpace
from kvwarehouse.model.dtypes import KvDtype

# A convolution's window is kept in the model's own 16 bits.
_CONV_BYTES = 2
# Recurrent states are kept in 32 bits: what engines do where a model asks for it, else the upper
# bound (some keep 16).
STATE_BYTES = 4

MOST_RANKS = 4096


@dataclass(frozen=True)
class Sharding:
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("TP", self.tp), ("PP", self.pp)):
            if not 1 <= value <= MOST_RANKS:
                raise UsageError(
                    f"{name} {value} cannot be; use 1 to {MOST_RANKS:,}", code="impossible_shape"
                )


@dataclass(frozen=True)
class Footprint:
    """Of one model and dtype. All figures are bytes."""

    model: Architecture
    dtype: KvDtype

    @property
    def bytes_per_token(self) -> int:
        """All attention layers full, stored once."""
        return sum(self.layer_bytes(layer) for layer in self.model.attention)

    @property
    def payload_bytes_per_token(self) -> int:
        return self.bytes_per_token - self.scale_bytes_per_token

    @property
    def scale_bytes_per_token(self) -> int:
        return sum(
            layer.kv_heads
            * (self.dtype.scales_bytes(layer.key_dim) + self.dtype.scales_bytes(layer.value_dim))
            for layer in self.model.attention
        )

    @property
    def growing_bytes_per_token(self) -> int:
        """What each further token adds once all windows and chunks are full."""
        return sum(
            self.layer_bytes(layer) for layer in self.model.attention if not layer.span_tokens
        )

    @property
    def state_bytes(self) -> int:
        """Of the state-space layers, per sequence, whatever its length."""
        return sum(_state_bytes(layer) for layer in self.model.state)

    @property
    def hidden_size_bytes_per_token(self) -> int | None:
        """Keys and values of `hidden_size` in every layer: what is published for models before
        their compression is counted. None where the hidden size is unknown."""
        if not self.model.hidden_size:
            return None
        return len(self.model.attention) * 2 * self.dtype.row_bytes(self.model.hidden_size)

    def layer_bytes(self, layer: Attention) -> int:
        """Per token that the layer holds."""
        row = self.dtype.row_bytes(layer.key_dim) + self.dtype.row_bytes(layer.value_dim)
        return layer.kv_heads * row + layer.fixed_bytes

    def context_bytes(self, tokens: int) -> int:
        """What a sequence of `tokens` really holds."""
        held = sum(
            self.layer_bytes(layer) * layer.held_tokens(tokens) for layer in self.model.attention
        )
        return held + self.state_bytes

    def rank_bytes_per_token(self, sharding: Sharding) -> int:
        """Of the rank that holds most: the largest pipeline stage, KV heads split over TP, or
        repeated where there are fewer heads than ranks, and the latent rows repeated on each."""
        return max(
            sum(self._rank_layer_bytes(layer, sharding.tp) for layer in stage)
            for stage in self._stages(sharding.pp)
        )

    def all_ranks_bytes_per_token(self, sharding: Sharding) -> int:
        """Over all ranks, repetitions counted: what the GPUs spend together."""
        return sharding.tp * sum(
            self._rank_layer_bytes(layer, sharding.tp) for layer in self.model.layers
        )

    def _rank_layer_bytes(self, layer: Layer, tp: int) -> int:
        if not isinstance(layer, Attention):
            return 0
        if layer.latent:
            return self.layer_bytes(layer)
        if layer.kv_heads % tp and tp % layer.kv_heads:
            raise UsageError(
                f"TP {tp} cannot split {layer.kv_heads} KV heads evenly; use a divisor or a"
                f" multiple of {layer.kv_heads}",
                code="impossible_shape",
            )
        heads = max(1, layer.kv_heads // tp)
        return (self.layer_bytes(layer) - layer.fixed_bytes) // layer.kv_heads * heads + (
            layer.fixed_bytes
        )

    def _stages(self, pp: int) -> list[tuple[Layer, ...]]:
        """Contiguous and as even as can be, the longer ones first."""
        layers = self.model.layers
        if pp > len(layers):
            raise UsageError(
                f"PP {pp} has more stages than the model has layers ({len(layers)}); use fewer",
                code="impossible_shape",
            )
        size, longer = divmod(len(layers), pp)
        stages, begin = [], 0
        for stage in range(pp):
            end = begin + size + (stage < longer)
            stages.append(layers[begin:end])
            begin = end
        return stages


def _state_bytes(layer: StateSpace) -> int:
    return layer.state_elements * STATE_BYTES + layer.conv_elements * _CONV_BYTES

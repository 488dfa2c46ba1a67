"""How many bytes of KV a model keeps: per row in a number format, per token, for a context, on one
rank.

Stateless; thread-safe. docs/sizing.md has the formulas. A *row* is what one scale may cover at
most: the key or the value of one head and token, or the latent vector of one token. Two figures
matter apart: `bytes_per_token` counts every attention layer as if it looked back over everything,
as is published; `context_bytes` counts what windows, chunks and states really hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import (
    Architecture,
    Attention,
    Layer,
    StateSpace,
    caches_of,
)

# A convolution's window is kept in the model's own 16 bits.
_CONV_BYTES = 2
# Recurrent states are kept in 32 bits: what engines do where a model asks for it, else the upper
# bound (some keep 16).
STATE_BYTES = 4

MOST_RANKS = 4096


@dataclass(frozen=True)
class KvDtype:
    """`scale_group` is the elements that share a scale: 0 means one scale a tensor, which costs no
    bytes per token; PER_ROW means one a row."""

    name: str
    bits: int
    scale_group: int = 0
    scale_bytes: int = 0

    PER_ROW = -1

    def row_bytes(self, elements: int) -> int:
        return self.payload_bytes(elements) + self.scales_bytes(elements)

    def payload_bytes(self, elements: int) -> int:
        return -(-elements * self.bits // 8)

    def scales_bytes(self, elements: int) -> int:
        if self.scale_group == 0 or elements == 0:
            return 0
        group = elements if self.scale_group == self.PER_ROW else self.scale_group
        return -(-elements // group) * self.scale_bytes

    def describe(self) -> str:
        if self.scale_group == 0:
            scales = "no scales" if self.bits >= 16 else "one scale a tensor"
        elif self.scale_group == self.PER_ROW:
            scales = f"a {self.scale_bytes}-byte scale for each token, head, key and value"
        else:
            scales = f"a {self.scale_bytes}-byte scale for each {self.scale_group} elements"
        return f"{self.bits} bits an element, {scales}"


# Scales: one per tensor is the default of FP8 in engines; a 4-byte scale for each token and head is
# vLLM's *_per_token_head; a 2-byte scale for 32 elements is the Q4_0 block of llama.cpp.
DTYPES: dict[str, KvDtype] = {
    dtype.name: dtype
    for dtype in (
        KvDtype("fp32", 32),
        KvDtype("fp16", 16),
        KvDtype("bf16", 16),
        KvDtype("fp8", 8),
        KvDtype("int8", 8, scale_group=KvDtype.PER_ROW, scale_bytes=4),
        KvDtype("int4", 4, scale_group=32, scale_bytes=2),
    )
}


def find_dtype(
    name: str, *, scale_group: int | None = None, scale_bytes: int | None = None
) -> KvDtype:
    """The format, with other scales where they are given (`scale_group` 0: one a tensor). Raises
    UsageError for an unknown name or scales that cannot be."""
    dtype = DTYPES.get(name.lower())
    if dtype is None:
        raise UsageError(
            f"the dtype {name!r} is unknown; use one of {', '.join(DTYPES)}", code="unknown_dtype"
        )
    if scale_group is None and scale_bytes is None:
        return dtype
    group = dtype.scale_group if scale_group is None else scale_group
    size = (dtype.scale_bytes or 2) if scale_bytes is None else scale_bytes
    if group < KvDtype.PER_ROW or size < 1:
        raise UsageError(
            f"a scale of {size} bytes for {group} elements cannot be; use 1 byte or more, and 0"
            " elements for one scale a tensor or 1 and more",
            code="bad_scale",
        )
    return replace(dtype, scale_group=group, scale_bytes=size)


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
        scales = self.dtype.scales_bytes
        return sum(
            layer.kv_heads * (scales(layer.key_dim) + scales(layer.value_dim)) // layer.row_tokens
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
        layers = sum(isinstance(layer, Attention) for layer in self.model.layers)
        return layers * 2 * self.dtype.row_bytes(self.model.hidden_size)

    def layer_bytes(self, layer: Attention) -> int:
        """Per token that the layer holds, rounded up; of one cache."""
        return -(-self.row_bytes(layer) // layer.row_tokens)

    def row_bytes(self, layer: Attention) -> int:
        row = self.dtype.row_bytes(layer.key_dim) + self.dtype.row_bytes(layer.value_dim)
        return layer.kv_heads * row + layer.fixed_bytes

    def context_bytes(self, tokens: int) -> int:
        """What a sequence of `tokens` really holds."""
        held = sum(
            self.row_bytes(layer) * layer.held_rows(tokens) for layer in self.model.attention
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
        return sum(self._rank_cache_bytes(cache, tp) for cache in caches_of(layer))

    def _rank_cache_bytes(self, layer: Attention, tp: int) -> int:
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

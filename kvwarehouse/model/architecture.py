"""What of a model decides how large its KV is: its layers, in order.

Plain immutable values; thread-safe. A model's numbers come from `models` (a shipped table),
`model_config` (a config.json) or flags; all of them are checked here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvwarehouse.errors import UsageError

MOST_LAYERS = 10_000

Span: TypeAlias = Literal["full", "window", "chunk"]


@dataclass(frozen=True)
class Attention:
    """A layer that keeps keys and values per token. A *latent* layer (MLA) keeps one compressed
    row, `key_dim` elements, that serves all heads as key and value; it has `value_dim` 0 and one
    head. `span_tokens` is the window or chunk that a layer looks back over at most (0: all).
    `row_tokens` tokens share a row where they are compressed. `fixed_bytes` are per row whatever
    the KV's dtype is (index keys of sparse attention). `beside` is what else the layer keeps (the
    window of DeepSeek-V4's compressed layers, the state of Falcon-H1's)."""

    kv_heads: int
    key_dim: int
    value_dim: int
    span: Span = "full"
    span_tokens: int = 0
    latent: bool = False
    fixed_bytes: int = 0
    row_tokens: int = 1
    beside: Attention | StateSpace | None = None

    def __post_init__(self) -> None:
        _positive("KV heads", self.kv_heads)
        _positive("head dimension", self.key_dim)
        _positive("tokens of a row", self.row_tokens)
        if (self.span == "full") != (self.span_tokens == 0) or self.span_tokens < 0:
            raise _impossible(f"a {self.span} layer that looks back {self.span_tokens} tokens")

    def held_rows(self, context_tokens: int) -> int:
        """How many rows this layer needs at most to go on after a context."""
        held = min(context_tokens, self.span_tokens) if self.span_tokens else context_tokens
        return held // self.row_tokens


@dataclass(frozen=True)
class StateSpace:
    """A layer that keeps a state of one size per sequence (Mamba, linear attention): a recurrent
    part and a short convolution's window, in elements. `heads` is what tensor parallelism splits;
    0 where it splits channels, of which there are always enough."""

    state_elements: int
    conv_elements: int
    heads: int = 0

    def __post_init__(self) -> None:
        _positive("state elements", self.state_elements)
        if self.conv_elements < 0:
            raise _impossible(f"a convolution state of {self.conv_elements} elements")


@dataclass(frozen=True)
class Stateless:
    """A layer that keeps nothing: MLP only, or one that reads another layer's keys and values."""


Layer: TypeAlias = Attention | StateSpace | Stateless


@dataclass(frozen=True)
class Architecture:
    """`params` and `active_params` (of a mixture of experts: per token) are 0 where unknown;
    `hidden_size` and `attention_heads` too."""

    name: str
    layers: tuple[Layer, ...]
    hidden_size: int = 0
    attention_heads: int = 0
    params: float = 0.0
    active_params: float = 0.0
    source: str = "the command line"

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MOST_LAYERS:
            raise _impossible(f"{len(self.layers)} layers", f"1 to {MOST_LAYERS:,}")
        for layer in self.layers:
            if isinstance(layer, Attention) and not layer.latent:
                self._check_heads(layer.kv_heads)

    def _check_heads(self, kv_heads: int) -> None:
        if self.attention_heads and self.attention_heads % kv_heads:
            raise _impossible(
                f"{self.attention_heads} attention heads over {kv_heads} KV heads",
                "a multiple of the KV heads",
            )

    @property
    def attention(self) -> tuple[Attention, ...]:
        """All caches of attention layers, those beside others too."""
        return tuple(cache for layer in self.layers for cache in caches_of(layer))

    @property
    def state(self) -> tuple[StateSpace, ...]:
        """Those beside attention too."""
        return tuple(state for layer in self.layers if (state := state_of(layer)))

    @property
    def latent(self) -> bool:
        return any(layer.latent for layer in self.attention)

    @property
    def kinds(self) -> dict[str, int]:
        """How many layers are of which kind: full, window, chunk, latent, compressed, state, and
        hybrid (attention and a state)."""
        return dict(Counter(kind for layer in self.layers if (kind := kind_of(layer))))

    @property
    def groups(self) -> list[tuple[Layer, int]]:
        """Each kind of layer and how many there are, in the order of their first."""
        return list(Counter(self.layers).items())


def caches_of(layer: Layer) -> tuple[Attention, ...]:
    if not isinstance(layer, Attention):
        return ()
    return (layer, layer.beside) if isinstance(layer.beside, Attention) else (layer,)


def state_of(layer: Layer) -> StateSpace | None:
    found = layer.beside if isinstance(layer, Attention) else layer
    return found if isinstance(found, StateSpace) else None


def kind_of(layer: Layer) -> str:
    """ "" where it keeps nothing."""
    if isinstance(layer, StateSpace):
        return "state"
    if not isinstance(layer, Attention):
        return ""
    if state_of(layer):
        return "hybrid"
    if layer.row_tokens > 1:
        return "compressed"
    return "latent" if layer.latent and layer.span == "full" else layer.span


def uniform(
    layers: int, kv_heads: int, head_dim: int, *, name: str = "given shape"
) -> Architecture:
    """Every layer the same, all of them full attention."""
    if not 1 <= layers <= MOST_LAYERS:
        raise _impossible(f"{layers} layers", f"1 to {MOST_LAYERS:,}")
    return Architecture(name, (Attention(kv_heads, head_dim, head_dim),) * layers)


def _positive(what: str, value: int) -> None:
    if value < 1:
        raise _impossible(f"{value} as the number of {what}", "1 or more")


def _impossible(what: str, fix: str = "a number that can be") -> UsageError:
    return UsageError(f"a model cannot have {what}; give {fix}", code="impossible_shape")

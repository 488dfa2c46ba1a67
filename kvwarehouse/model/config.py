"""A model's config.json: read as checked fields, and made an Architecture.

Stateless; thread-safe. Every complaint names the file and the field; a file is read once, at most
MOST_BYTES of it. The field names are those of Hugging Face's transformers. A family that says its
layers one by one (`layer_types`, `hybrid_override_pattern`) is believed; older ones are known by
their period or their `model_type`. State-space and linear-attention layers have the shapes that
transformers and vLLM allocate: a recurrent state per head or channel, and the last inputs of a
short convolution (its width less one). A configuration that says something of its layers that is
not read here is refused: what it would be taken for is larger or smaller, and nobody would see it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import (
    MOST_LAYERS,
    Architecture,
    Attention,
    Layer,
    Span,
    Stateless,
    StateSpace,
)

MOST_BYTES = 16 * 1024 * 1024
_LARGEST = 2**31

# What families call one layer, and what it is here.
_KINDS: dict[str, str] = {
    "full_attention": "full",
    "indexed_attention": "full",
    "minimax_m3_sparse": "full",
    "attention": "full",
    "hybrid": "hybrid",
    "sliding_attention": "window",
    "sliding_window_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "conv",
    "mlp": "none",
    "moe": "none",
}
# MiniMax's `attn_type_list`.
_NUMBERED_KINDS = {0: "state", 1: "full"}
_NAMED_LAYERS = ("layer_types", "layers_block_type")
_PATTERN_KINDS = {"M": "state", "*": "full", "-": "none", "E": "none"}

# Fields that say something of single layers, or of all of them, and are not read here.
_NOT_READ = (
    "num_attention_groups",  # Step-3
    "num_key_value_heads_per_layer",  # DeciLM-7B
    "cross_attention_layers",  # Llama 3.2 Vision
    "layer_group_size",  # Ring with linear attention
)

# Bytes of the FP8 scale that goes with each 128 index elements of sparse MLA (DeepSeek-V3.2). Other
# families keep index keys in 16 bits.
_INDEX_GROUP = 128
_INDEX_SCALE_BYTES = 4
_PLAIN_INDEX_BYTES = 2


class ConfigFields:
    """The fields of one configuration; `source` is where it came from, for messages."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self._fields = fields
        self.source = source

    def has(self, name: str) -> bool:
        """The field is there and not null."""
        return self._fields.get(name) is not None

    def says(self, name: str) -> bool:
        """The field is there, and neither null nor empty."""
        return bool(self._fields.get(name))

    def with_prefix(self, prefix: str) -> list[str]:
        """Names of fields that are there and not null."""
        return sorted(name for name in self._fields if name.startswith(prefix) and self.has(name))

    def flag(self, name: str, default: bool) -> bool:
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.bad(name, "text")
        return value

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of `names` that is there. Families call the same number differently."""
        for name in names:
            if not self.has(name):
                continue
            value = self._fields[name]
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.bad(name, "a whole number")
            if not least <= value <= _LARGEST:
                raise self.bad(name, f"{least} to {_LARGEST:,}")
            return value
        if default is None:
            raise UsageError(
                f"{self.source} has no {names[0]}: it is not the config.json of a model that"
                " generates text, or of a family that is not known; give the shape by flags",
                code="bad_model_config",
            )
        return default

    def texts(self, name: str) -> list[str]:
        return [str(each) for each in self._list(name, str, "a list of text")]

    def numbers(self, name: str) -> list[int]:
        return [int(each) for each in self._list(name, int, "a list of whole numbers")]

    def sections(self, name: str) -> list[ConfigFields]:
        """A list of nested objects."""
        return [
            ConfigFields(each, f"{name}[{at}] of {self.source}")
            for at, each in enumerate(self._list(name, dict, "a list of objects"))
        ]

    def section(self, name: str) -> ConfigFields | None:
        """A nested object, or None where it is not there."""
        if not self.has(name):
            return None
        value = self._fields[name]
        if not isinstance(value, dict):
            raise self.bad(name, "an object")
        return ConfigFields(value, f"{name} of {self.source}")

    def bad(self, name: str, wanted: str) -> UsageError:
        shown = json.dumps(self._fields.get(name), default=str)[:80]
        return UsageError(
            f"{self.source}: {name} is {shown}; it must be {wanted}", code="bad_model_config"
        )

    def _list(self, name: str, kind: type, wanted: str) -> list[Any]:
        value = self._fields.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.bad(name, wanted)
        return value


def read_config(path: str | Path) -> ConfigFields:
    """Of a config.json, or of a folder that has one. Raises UsageError that says what is wrong."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the model configuration {file} cannot be read: {error.strerror}", code="no_config"
        ) from error
    if len(text) > MOST_BYTES:
        raise UsageError(
            f"{file} is larger than {MOST_BYTES:,} bytes: it is no config.json", code="no_config"
        )
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}", code="bad_model_config") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{file} is JSON but no object", code="bad_model_config")
    return ConfigFields(fields, str(file))


def state_layer(fields: ConfigFields, *, convolution_only: bool = False) -> StateSpace:
    """Raises UsageError where the fields of no known family are there."""
    if convolution_only:
        return _short_convolution(fields)
    if fields.has("linear_num_value_heads"):
        return _delta_net(fields)
    if fields.has("attn_type_list") or fields.text("model_type") == "minimax":
        return _lightning(fields)
    linear = fields.section("linear_attn_config")
    if linear is not None:
        return _kimi_delta(linear)
    if any(fields.has(name) for name in ("mamba_num_heads", "mamba_n_heads")):
        return _mamba2(fields)
    if fields.text("model_type") == "mamba2":
        return _mamba2(fields)
    if any(fields.has(name) for name in ("mamba_d_state", "state_size")):
        return _mamba1(fields)
    raise UsageError(
        f"{fields.source} has layers with states, and no field that says how large they are and is"
        " known; give the shape of its attention layers by flags",
        code="unsupported_model",
    )


def _delta_net(fields: ConfigFields) -> StateSpace:
    """Gated delta rule (Qwen3-Next): a matrix of key by value dimension for each value head."""
    key_heads = fields.count("linear_num_key_heads")
    value_heads = fields.count("linear_num_value_heads")
    key_dim = fields.count("linear_key_head_dim")
    value_dim = fields.count("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    width = fields.count("linear_conv_kernel_dim", default=4)
    return StateSpace(value_heads * key_dim * value_dim, channels * (width - 1), value_heads)


def _lightning(fields: ConfigFields) -> StateSpace:
    """Lightning attention (MiniMax-Text-01): a square matrix for each query head, no
    convolution."""
    heads = fields.count("num_attention_heads")
    dim = fields.count("head_dim", default=fields.count("hidden_size") // heads)
    return StateSpace(heads * dim * dim, 0, heads)


def _kimi_delta(fields: ConfigFields) -> StateSpace:
    """Kimi Delta Attention: a square matrix for each head; queries, keys and values are convolved
    apart."""
    heads, dim = fields.count("num_heads"), fields.count("head_dim")
    width = fields.count("short_conv_kernel_size", default=4)
    return StateSpace(heads * dim * dim, 3 * heads * dim * (width - 1), heads)


def _mamba2(fields: ConfigFields) -> StateSpace:
    """A matrix of head by state dimension for each head; the convolution runs over the inner
    channels and two groups of state channels."""
    heads = fields.count("mamba_num_heads", "mamba_n_heads", "num_heads")
    head_dim = fields.count("mamba_head_dim", "mamba_d_head", "head_dim", default=64)
    state = fields.count("ssm_state_size", "mamba_d_state", "state_size")
    groups = fields.count("mamba_n_groups", "n_groups", default=1)
    width = fields.count("conv_kernel", "mamba_d_conv", default=4)
    channels = heads * head_dim + 2 * groups * state
    return StateSpace(heads * head_dim * state, channels * (width - 1), heads)


def _mamba1(fields: ConfigFields) -> StateSpace:
    """A state vector for each inner channel."""
    hidden = fields.count("hidden_size", "d_model")
    expand = fields.count("mamba_expand", "expand", default=2)
    inner = fields.count("mamba_intermediate_size", "mamba_d_inner", default=hidden * expand)
    state = fields.count("mamba_d_state", "state_size", default=16)
    width = fields.count("mamba_d_conv", "conv_kernel", default=4)
    return StateSpace(inner * state, inner * (width - 1))


def _short_convolution(fields: ConfigFields) -> StateSpace:
    """Gated short convolutions (LFM2): the last inputs of each hidden channel, nothing more."""
    width = fields.count("conv_L_cache", default=3)
    return StateSpace(fields.count("hidden_size") * width, 0)


def architecture_of(
    fields: ConfigFields, *, name: str = "", params: float = 0.0, active_params: float = 0.0
) -> Architecture:
    """Raises UsageError for what is no model that keeps KV, or says contradictory things."""
    if fields.flag("is_encoder_decoder", False):
        raise UsageError(
            f"{fields.source} is an encoder-decoder model: its cache is of two kinds, which is not"
            " supported; give the decoder's shape by flags",
            code="unsupported_model",
        )
    # The language part of a model that sees or hears stands in a section of its own.
    for section in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = fields.section(section)
        if inner is not None:
            return architecture_of(inner, name=name, params=params, active_params=active_params)
    layers = _layers(fields)
    return Architecture(
        name=name or fields.text("_name_or_path") or fields.text("model_type") or "model",
        layers=layers,
        hidden_size=fields.count("hidden_size", "n_embd", "d_model", default=0, least=0),
        attention_heads=_attention_heads(fields, layers),
        params=params,
        active_params=active_params or params,
        source=fields.source,
    )


def _attention_heads(fields: ConfigFields, layers: tuple[Layer, ...]) -> int:
    if not any(isinstance(layer, Attention) for layer in layers):
        return 0
    return fields.count("num_attention_heads", "n_head", "n_heads", default=0)


def _layers(fields: ConfigFields) -> tuple[Layer, ...]:
    if fields.has("compress_ratios"):
        return _compressed_layers(fields)
    if fields.says("block_configs"):
        return _blocks(fields)
    named = _kinds(fields)
    _refuse_what_is_not_read(fields, named)
    kinds = [(kind, _index_bytes(fields, at)) for at, kind in enumerate(named)]
    by_kind: dict[tuple[str, int], Layer] = {each: _layer(*each, fields) for each in set(kinds)}
    layers = [by_kind[each] for each in kinds]
    shared = fields.count("num_kv_shared_layers", default=0, least=0)
    if shared >= len(layers):
        raise fields.bad("num_kv_shared_layers", "less than the layers")
    # The last layers read what earlier ones kept (Gemma 3n).
    layers[len(layers) - shared :] = [Stateless()] * shared
    return tuple(layers)


def _refuse_what_is_not_read(fields: ConfigFields, kinds: list[str]) -> None:
    unread = [name for name in _NOT_READ if fields.says(name)]
    # Where layers are named one by one, fields of a kind that none of them is may stay behind.
    named = any(fields.has(name) for name in (*_NAMED_LAYERS, "hybrid_override_pattern"))
    if not named and not {"state", "hybrid"}.intersection(kinds):
        unread += fields.with_prefix("mamba_")
    if unread:
        raise UsageError(
            f"{fields.source}: {unread[0]} says something of the layers that is not known here;"
            " give the shape by flags",
            code="unsupported_model",
        )


def _blocks(fields: ConfigFields) -> tuple[Layer, ...]:
    """Llama-Nemotron: each layer has as many KV heads as its search found, or no attention."""
    blocks = fields.sections("block_configs")
    if len(blocks) != _count(fields):
        raise fields.bad("block_configs", f"one object for each of {_count(fields)} layers")
    return tuple(_block(block, fields) for block in blocks)


def _block(block: ConfigFields, fields: ConfigFields) -> Layer:
    attention = block.section("attention")
    if attention is None:
        raise block.bad("attention", "an object")
    if attention.flag("no_op", False) or attention.flag("replace_with_linear", False):
        return Stateless()
    for name in ("window_length", "sparsify", "mamba", "llama4"):
        if attention.says(name):
            raise UsageError(
                f"{attention.source}: {name} is not known here; give the shape by flags",
                code="unsupported_model",
            )
    heads = fields.count("num_attention_heads")
    group = attention.count("n_heads_in_group")
    if heads % group:
        raise attention.bad("n_heads_in_group", f"a divisor of {heads} attention heads")
    dim = _heads(fields)[1]
    return Attention(heads // group, dim, dim)


def _layer(kind: str, index_bytes: int, fields: ConfigFields) -> Layer:
    if kind == "none":
        return Stateless()
    if kind in ("state", "conv"):
        return state_layer(fields, convolution_only=kind == "conv")
    if fields.has("kv_lora_rank"):
        return _latent_layer(fields, index_bytes)
    span: Span = "full"
    span_tokens = 0
    if kind == "window":
        span, span_tokens = "window", fields.count("sliding_window", "sliding_window_size")
    elif kind == "chunk":
        span, span_tokens = "chunk", fields.count("attention_chunk_size")
    heads, head_dim = _heads(fields)
    if kind == "full" and fields.has("global_head_dim"):  # Gemma 4
        head_dim = fields.count("global_head_dim")
        heads = fields.count("num_global_key_value_heads", default=heads)
    value_dim = fields.count("v_head_dim", default=head_dim)
    fixed_bytes = index_bytes if kind == "full" else 0
    beside = state_layer(fields) if kind == "hybrid" else None
    return Attention(
        heads, head_dim, value_dim, span, span_tokens, fixed_bytes=fixed_bytes, beside=beside
    )


def _latent_layer(fields: ConfigFields, index_bytes: int) -> Attention:
    """MLA: one latent vector and one rotary key a token, for all heads."""
    rotary = fields.count("qk_rope_head_dim", default=0, least=0)
    row = fields.count("kv_lora_rank") + rotary
    return Attention(1, row, 0, latent=True, fixed_bytes=index_bytes)


def _index_bytes(fields: ConfigFields, at: int) -> int:
    """Of the index keys that layer `at` keeps of each token if it attends sparsely, whatever else
    it is."""
    sparse = fields.section("sparse_attention_config")
    if sparse is not None:  # MiniMax-M3
        which = sparse.numbers("sparse_attention_freq")
        indexed = at < len(which) and which[at] != 0
        return sparse.count("sparse_index_dim") * _PLAIN_INDEX_BYTES if indexed else 0
    if fields.has("indexer_head_dim"):  # Qwen4-Exp: one key for a group of tokens
        key = fields.count("indexer_head_dim") * _PLAIN_INDEX_BYTES
        return -(-key // fields.count("indexer_compress_ratio"))
    if not fields.has("index_head_dim") or not _has_indexer(fields, at):
        return 0
    # GLM-5.3-Flash: one key for a pool of tokens.
    return -(-_index_row_bytes(fields) // fields.count("index_kpool", default=1))


def _index_row_bytes(fields: ConfigFields) -> int:
    index = fields.count("index_head_dim")
    return index + -(-index // _INDEX_GROUP) * _INDEX_SCALE_BYTES


def _has_indexer(fields: ConfigFields, at: int) -> bool:
    """From GLM-5.2 on most layers use the tokens that an earlier layer's index chose."""
    if fields.has("indexer_types"):
        types = fields.texts("indexer_types")
        return at < len(types) and types[at] == "full"
    if fields.has("index_topk_pattern"):
        return fields.text("index_topk_pattern")[at : at + 1] != "S"
    every = fields.count("index_topk_freq", default=1)
    offset = fields.count("index_skip_topk_offset", default=2, least=0)
    return max(at - offset + 1, 0) % every == 0


def _compressed_layers(fields: ConfigFields) -> tuple[Layer, ...]:
    """DeepSeek-V4: every layer has a window, and most have rows that stand for several tokens
    each; those of a ratio of 4 have an index key a row. In V4.1 only some layers have such rows,
    all with index keys, and the others read theirs."""
    count = fields.count("num_hidden_layers")
    ratios = fields.numbers("compress_ratios")
    if not count <= len(ratios) <= MOST_LAYERS or min(ratios) < 0:
        raise fields.bad("compress_ratios", f"one number for each of {count} layers, 0 or more")
    shared = fields.has("kv_source_layer_ids")
    sources = fields.numbers("kv_source_layer_ids") if shared else range(count)
    dim = fields.count("head_dim")
    window = Attention(1, dim, 0, "window", fields.count("sliding_window"), latent=True)

    def layer(at: int, ratio: int) -> Attention:
        if ratio == 0 or at not in sources:
            return window
        index = _index_row_bytes(fields) if shared or ratio == 4 else 0
        return Attention(1, dim, 0, latent=True, fixed_bytes=index, row_tokens=ratio, beside=window)

    return tuple(layer(at, ratio) for at, ratio in enumerate(ratios[:count]))


def _heads(fields: ConfigFields) -> tuple[int, int]:
    """KV heads and the dimension of one."""
    heads = fields.count("num_attention_heads", "n_head", "n_heads")
    kv_heads = _kv_heads(fields, heads)
    if fields.has("head_dim") or fields.has("kv_channels") or fields.has("attention_head_dim"):
        return kv_heads, fields.count("head_dim", "kv_channels", "attention_head_dim")
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise UsageError(
            f"{fields.source}: a hidden size of {hidden} is no multiple of {heads} attention heads,"
            " and there is no head_dim",
            code="bad_model_config",
        )
    return kv_heads, hidden // heads


def _kv_heads(fields: ConfigFields, heads: int) -> int:
    # Falcon: one head for all, unless its newer form says how many.
    if fields.flag("multi_query", False) and not fields.flag("new_decoder_architecture", False):
        return 1
    inner = fields.section("attn_config")
    if inner is not None and inner.has("kv_n_heads"):
        return inner.count("kv_n_heads")
    return fields.count(
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", default=heads
    )


# --- which layer is what --------------------------------------------------------------------------


def _kinds(fields: ConfigFields) -> list[str]:
    pattern = fields.text("hybrid_override_pattern")
    if pattern:
        return _from_pattern(fields, pattern)
    count = _count(fields)
    for name in _NAMED_LAYERS:
        if fields.has(name):
            return _from_names(fields, name, count)
    if fields.has("attn_type_list"):
        return _from_numbers(fields, "attn_type_list", count)
    return [_kind_at(fields, at) for at in range(count)]


def _count(fields: ConfigFields) -> int:
    count = fields.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count > MOST_LAYERS:
        raise fields.bad("num_hidden_layers", f"1 to {MOST_LAYERS:,}")
    return count


def _from_numbers(fields: ConfigFields, name: str, count: int) -> list[str]:
    numbers = fields.numbers(name)
    if len(numbers) != count or not set(numbers) <= set(_NUMBERED_KINDS):
        raise fields.bad(name, f"0 or 1 for each of {count} layers")
    return [_NUMBERED_KINDS[each] for each in numbers]


def _from_pattern(fields: ConfigFields, pattern: str) -> list[str]:
    unknown = set(pattern) - set(_PATTERN_KINDS)
    if unknown:
        raise fields.bad("hybrid_override_pattern", f"of {' '.join(_PATTERN_KINDS)}")
    return [_PATTERN_KINDS[letter] for letter in pattern]


def _from_names(fields: ConfigFields, name: str, count: int) -> list[str]:
    named = fields.texts(name)
    if len(named) != count:
        raise fields.bad(name, f"one name for each of {count} layers")
    unknown = sorted(set(named) - set(_KINDS))
    if unknown:
        raise UsageError(
            f"{fields.source}: {name} has {unknown[0]!r}, a kind of layer that is not known; known:"
            f" {', '.join(_KINDS)}",
            code="unsupported_model",
        )
    return [_KINDS[each] for each in named]


def _kind_at(fields: ConfigFields, at: int) -> str:
    """Of layer `at`, for families that say a period, or nothing."""
    linear = fields.section("linear_attn_config")
    if linear is not None and linear.has("full_attn_layers"):  # counted from 1
        return "full" if at + 1 in linear.numbers("full_attn_layers") else "state"
    if fields.has("full_attention_interval"):
        return "full" if (at + 1) % fields.count("full_attention_interval") == 0 else "state"
    if fields.has("attn_layer_period"):
        period = fields.count("attn_layer_period")
        offset = fields.count("attn_layer_offset", default=0, least=0)
        return "full" if at % period == offset else "state"
    if fields.has("attn_layer_indices"):
        return "full" if at in fields.numbers("attn_layer_indices") else "state"
    if fields.text("model_type") in ("mamba", "mamba2", "falcon_mamba"):
        return "state"
    if fields.text("model_type") == "falcon_h1":
        return "hybrid"
    if fields.has("attention_chunk_size"):
        return "full" if _without_rotary(fields, at) else "chunk"
    return "window" if _windowed(fields, at) else "full"


def _without_rotary(fields: ConfigFields, at: int) -> bool:
    """Llama 4: layers without rotary positions look at everything, the others at their chunk. In
    its list 0 means without; where there is no list it is every fourth layer."""
    rotary = fields.numbers("no_rope_layers") if fields.has("no_rope_layers") else []
    if rotary:
        return at < len(rotary) and rotary[at] == 0
    return (at + 1) % fields.count("no_rope_layer_interval", default=4) == 0


def _windowed(fields: ConfigFields, at: int) -> bool:
    if not fields.has("sliding_window"):
        return False
    if not fields.flag("use_sliding_window", True):
        return False
    family = fields.text("model_type")
    if fields.has("sliding_window_pattern") or family.startswith("gemma3"):
        return (at + 1) % fields.count("sliding_window_pattern", default=6) != 0
    if family in ("gemma2", "gpt_oss"):
        return at % 2 == 0
    # Qwen: the first layers are full, as many as are named.
    return at >= fields.count("max_window_layers", default=0, least=0)

"""Which models the connector can serve, and the shape of their cache.

A page must be a function of the tokens up to its end and of nothing else. What breaks that (a
window, a recurrent state, frequencies that move with the prompt's length) is refused by name when
the connector is made, not discovered as wrong text later. Stateless.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvwarehouse as kvw
from kvwarehouse_connectors.core import Plane

# Before it some models with a recurrent state had caches that looked like any other's.
_LOWEST_VERSION = (5, 16)
_MOVING_ROPE = ("dynamic", "longrope")
_LOGITS_TO_KEEP = "logits_to_keep"


@dataclass(frozen=True)
class CacheShape:
    """What a layer's cache tensors are like, found by running one token through the model.

    heads: (heads of keys, size of one, heads of values, size of one), one a layer."""

    heads: tuple[tuple[int, int, int, int], ...]
    dtype: torch.dtype
    device: torch.device
    keeps_logits: bool
    """Whether the model's forward can leave out the logits of all tokens but the last."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """For each layer its keys, then its values."""
        item = self.dtype.itemsize
        return tuple(
            Plane(heads, size * item)
            for key_heads, key_size, value_heads, value_size in self.heads
            for heads, size in ((key_heads, key_size), (value_heads, value_size))
        )


def require_supported(model: Any) -> None:
    """Raises UsageError (code "unsupported_model") that names the model and what was found, or
    (code "unsupported_version") for a library that is too old to be judged."""
    _require_version()
    name = type(model).__name__
    if isinstance(model, torch.nn.Module):
        _require_no_adapters(model)
    if not isinstance(model, transformers.PreTrainedModel):
        raise _refused(name, "is not a transformers.PreTrainedModel; pass the model itself")
    config = model.config
    if config.is_encoder_decoder:
        raise _refused(name, "is an encoder-decoder; only decoders have a cache of prefixes")
    if not _is_causal_lm(model):
        raise _refused(name, "is no causal LM that the library knows (AutoModelForCausalLM)")
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", False):
        raise _refused(name, "has bidirectional attention: a token's KV depends on later tokens")
    for layer, found in enumerate(DynamicCache(config=config).layers):
        if type(found) is not DynamicLayer:
            kind = type(found).__name__
            raise _refused(name, f"has a {kind} in layer {layer}; every layer must be DynamicLayer")
    for rope_type in _rope_types(getattr(text, "rope_parameters", None)):
        if rope_type in _MOVING_ROPE:
            raise _refused(
                name, f'has rope_type "{rope_type}": its keys depend on the length of the prompt'
            )
    require_unchanged(model)


def _require_version() -> None:
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _LOWEST_VERSION:
        lowest = ".".join(map(str, _LOWEST_VERSION))
        raise kvw.UsageError(
            f"transformers {version} is too old for this connector, which tells unsafe models by "
            f"their caches since {lowest}: pip install 'transformers>={lowest}'",
            code="unsupported_version",
        )


def require_unchanged(model: Any) -> None:
    """What can change after the connector was made; cheap enough for every prefill.

    Raises UsageError: "unsupported_model" for adapters, "training" for a model in training."""
    name = type(model).__name__
    _require_no_adapters(model)
    if model.training:
        raise kvw.UsageError(
            f"{name} is in training mode, where dropout makes KV random; call model.eval()",
            code="training",
        )


def _require_no_adapters(model: torch.nn.Module) -> None:
    found = _peft_modules(model)
    if found or getattr(model, "_hf_peft_config_loaded", False):
        kinds = f" ({', '.join(found)})" if found else ""
        raise _refused(
            type(model).__name__,
            f"has adapters loaded{kinds}, which the fingerprint does not cover; merge them"
            " (merge_and_unload in peft), and let weights= name the merged weights",
        )


def _peft_modules(model: torch.nn.Module) -> list[str]:
    """The kinds of modules that peft has put into the model. It puts them in place of layers of the
    model that it wraps, which does not say so itself: transformers' flag is of its own load_adapter
    alone, and `peft_config` stays where older versions have merged and unloaded adapters."""
    kinds = {type(module) for module in model.modules()}
    return sorted(
        kind.__name__
        for kind in kinds
        if any(base.__module__.startswith("peft.") for base in kind.__mro__)
    )


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument that hands `cache` to the model: `cache` since transformers 5.24,
    `past_key_values` before, which later versions warn of and 6.0 no longer takes."""
    new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if new else "past_key_values": cache}


def observe(model: Any) -> CacheShape:
    """Runs one token through the model and looks at its cache. Raises UsageError (code
    "unsupported_model") where that is not one pair of tensors a layer, all on one device."""
    name = type(model).__name__
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, use_cache=True, **with_cache(model, cache))
    for layer, found in enumerate(cache.layers):
        if not found.is_initialized or found.keys is None or found.keys.shape[-2] != 1:
            raise _refused(name, f"keeps no keys of its own in layer {layer}")
        if found.keys.ndim != 4 or found.values.ndim != 4 or found.values.shape[-2] != 1:
            shape = f"{list(found.keys.shape)} and {list(found.values.shape)}"
            raise _refused(name, f"has keys and values of shapes {shape} in layer {layer}")
    kinds = {(t.dtype, t.device) for found in cache.layers for t in (found.keys, found.values)}
    if len(kinds) != 1:
        shown = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise _refused(name, f"spreads its cache over {shown}; use one type and one device")
    [(dtype, device)] = kinds
    heads = tuple((*_head_shape(found.keys), *_head_shape(found.values)) for found in cache.layers)
    keeps = _LOGITS_TO_KEEP in inspect.signature(model.forward).parameters
    return CacheShape(heads, dtype, device, keeps)


def _head_shape(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.shape[1]), int(tensor.shape[3])


def _is_causal_lm(model: Any) -> bool:
    known: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known.update((names,) if isinstance(names, str) else names)
    return any(base.__name__ in known for base in type(model).__mro__)


def _rope_types(parameters: Any) -> list[str]:
    """The rope types of a config; some models have one for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [str(parameters["rope_type"])]
    return [kind for nested in parameters.values() for kind in _rope_types(nested)]


def _refused(name: str, found: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"{name} {found}; this connector serves causal LMs with a plain cache in every layer",
        code="unsupported_model",
        context={"model": name, "found": found},
    )

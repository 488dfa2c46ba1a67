"""The namespace of a model: everything its pages depend on besides their tokens. Stateless."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core import PageGeometry
from kvwarehouse_connectors.transformers.grid import ChunkGrid
from kvwarehouse_connectors.transformers.support import CacheShape

LAYOUT = "transformers/1"
"""For each layer the keys, then the values, each [heads, page_tokens, size] (docs/transformers.md).
Another order is another version."""

# Where a checkpoint lies and who wrote its config change no KV.
_INCIDENTAL = ("_name_or_path", "transformers_version")


def namespace_of(
    model: Any, weights: str, shape: CacheShape, geometry: PageGeometry, grid: ChunkGrid
) -> kvw.Namespace:
    """weights: the fingerprint of the model's weights (kvw.fingerprint)."""
    dtype = dtype_name(model.dtype)
    kv_dtype = dtype_name(shape.dtype)
    return kvw.Namespace(
        model=f"{type(model).__name__}/{config_digest(model.config)}",
        weights=weights,
        dtype=dtype,
        layout=LAYOUT,
        page_tokens=geometry.page_tokens,
        page_bytes=geometry.page_bytes,
        kv_dtype="" if kv_dtype == dtype else kv_dtype,
        attention_backend=str(model.config._attn_implementation),
        extra={"chunk_tokens": str(grid.chunk_tokens)},
    )


def config_digest(config: Any) -> str:
    """32 hex digits over the whole config. A field that changes no KV costs a miss, a field left
    out could cost a wrong answer: so all count."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _INCIDENTAL}
    text = json.dumps(fields, sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)

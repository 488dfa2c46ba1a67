"""The namespaces of an engine: everything its blocks depend on besides their tokens.

Stateless. Reads the files of the weights (seconds for large models): at the start only.
"""

from __future__ import annotations

import hashlib
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.identity import (
    checkpoint_fingerprint,
    digest_of,
    no_weights,
    short_name,
)
from kvwarehouse_connectors.trtllm import arguments, compat
from kvwarehouse_connectors.trtllm.keys import SCHEME
from kvwarehouse_connectors.trtllm.parts import Cache, Part
from kvwarehouse_connectors.trtllm.settings import PREFIX, Settings

LAYOUT = "trtllm/1"
"""A layer group's bytes of one block: of a pool tensor as they lie, of a layout region by region in
its order; which order that is stands in cache_group."""

_WHERE = f"the environment ({PREFIX}WEIGHTS)"


def weights_fingerprint(llm_args: Any, settings: Settings) -> str:
    """Of the weights that this engine loaded, or the name given in their place. Raises UsageError
    (code "no_weights") where there are no files to read."""
    if settings.weights:
        return settings.weights
    if arguments.loads_no_weights(llm_args):
        raise no_weights("load_format is dummy: such weights are in no file", _WHERE)
    revision = getattr(llm_args, "revision", None) or None
    return checkpoint_fingerprint(str(llm_args.model), revision, None, _WHERE)


def namespaces(
    llm_args: Any, cache: Cache, weights: str, settings: Settings
) -> tuple[kvw.Namespace, ...]:
    """One for each part, in their order. The same on all ranks of one engine."""
    telling = arguments.telling_arguments(llm_args)
    ranks = arguments.tensor_parallel(llm_args)
    return tuple(
        kvw.Namespace(
            model=short_name(str(llm_args.model)),
            weights=weights,
            dtype=telling["dtype"],
            layout=LAYOUT,
            page_tokens=cache.block_tokens,
            page_bytes=part.page_bytes,
            shards=1 if part.replicated else ranks,
            kv_dtype=telling["kv_cache_dtype"],
            attention_backend=telling["attn_backend"],
            cache_group=_part_name(part),
            salt=settings.salt,
            hash_scheme=SCHEME,
            extra={
                "arguments": digest_of(telling),
                "device": part.device,
                "ranks": str(ranks),
                "tensorrt_llm": compat.VERSION,
            },
        )
        for part in cache.parts
    )


def barrier_space(spaces: tuple[kvw.Namespace, ...], ranks: int) -> kvw.Namespace:
    """Where ranks that can load from `spaces` say so: a page of it is complete when all have. Ranks
    with other spaces answer elsewhere. Its pages have the size of a model's, so that they need no
    slab of their own."""
    return kvw.Namespace(
        model="kvwarehouse/roll-call",
        weights="none",
        dtype="uint8",
        layout="roll-call/1",
        page_tokens=1,
        page_bytes=min(space.page_bytes for space in spaces),
        shards=ranks,
        hash_scheme="random",
        extra={"spaces": digest_of([space.id.hex() for space in spaces])},
    )


def _part_name(part: Part) -> str:
    """By its layers and their order, so that two groups of equal shape stay apart."""
    text = part.group.layer_names[0]
    return f"{part.group.index}/{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

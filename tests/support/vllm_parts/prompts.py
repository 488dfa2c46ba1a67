"""Groups of blocks that tests of both halves use, and a prompt that is stored in them."""

from __future__ import annotations

import random
from typing import Any

from vllm_parts.halves import Engine
from vllm_parts.requests import request, tokens
from vllm_parts.specs import full, group, window


def one_group() -> list[Any]:
    return [group(full(16), "a", "b")]


def second_stage() -> list[Any]:
    """Of a pipeline whose first stage has one_group."""
    return [group(full(16), "c", "d")]


def one_window() -> list[Any]:
    return [group(window(16, 64), "a", "b")]


def two_groups() -> list[Any]:
    return [group(full(16), "a", "b"), group(window(16, 40), "c", "d")]


def two_sizes() -> list[Any]:
    return [group(full(16), "a"), group(full(32, heads=1), "b")]


def one_layer() -> list[Any]:
    return [group(full(16), "a")]


def stored_prompt(
    engine: Engine, rng: random.Random, count: int = 160, **options: Any
) -> tuple[list[int], list[Any]]:
    """A prompt that the engine computed and stored in blocks 1 and on of its first group; its
    tokens, and what the blocks held."""
    ids = tokens(rng, count)
    blocks = list(range(1, count // 16 + 1))
    content = engine.fill(blocks)
    first = request(ids, name="first", **options)
    engine.scheduler.on_new_request(first)
    engine.compute(first, [blocks], count)
    engine.stored(request([*ids, 1], name="asks", **options), count)
    return ids, content

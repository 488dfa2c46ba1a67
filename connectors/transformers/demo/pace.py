"""How fast this machine is with this model, and which prompts fit into the demo's time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvwarehouse_connectors.transformers.grid import ChunkGrid
from kvwarehouse_connectors.transformers.support import with_cache

LENGTHS = (512, 1024, 2048, 4096, 8192)
BUDGET_S = 120.0
UNIT_TOKENS = LENGTHS[0]
ANSWER_TOKENS = 12

# A prompt of n units costs n, and attention to it grows with its square: fitted to 512 to 8,192
# tokens of an 82M model on two cores.
_ATTENTION = 0.09
_DECODE_STEPS = 2
_WAYS_TO_LOAD = 3


@dataclass(frozen=True)
class Pace:
    """unit_s: 512 tokens in chunks, as the demo computes them. piece_s: the same in one piece.
    step_s: one generated token."""

    unit_s: float
    piece_s: float
    step_s: float
    chunk_tokens: int

    def prompt_s(self, tokens: int) -> float:
        """Expected seconds to compute a prompt."""
        units = tokens / UNIT_TOKENS
        return self.unit_s * (units + _ATTENTION * units * (units - 1))

    def rest_s(self, tokens: int) -> float:
        """Expected seconds for the one or two chunks that are left after a load."""
        share = 1.5 * self.chunk_tokens / UNIT_TOKENS
        return self.unit_s * share * (1 + 2 * _ATTENTION * tokens / UNIT_TOKENS)

    def answer_s(self) -> float:
        return self.step_s * ANSWER_TOKENS

    def demo_s(self, lengths: Sequence[int]) -> float:
        """The whole demo: the document once, then every prompt computed, and loaded three ways."""
        computed = self.prompt_s(max(lengths)) + sum(map(self.prompt_s, lengths))
        loaded = _WAYS_TO_LOAD * sum(map(self.rest_s, lengths))
        return computed + loaded + (1 + _WAYS_TO_LOAD) * len(lengths) * self.answer_s()

    def seen(self, tokens: int, took_s: float) -> Pace:
        """This pace, or a slower one, if a prompt took longer than expected: other work came."""
        slower = max(1.0, took_s / self.prompt_s(tokens))
        return replace(self, unit_s=self.unit_s * slower, step_s=self.step_s * slower)

    def lengths(self, longest: int, budget_s: float = BUDGET_S) -> tuple[int, ...]:
        """The prompt lengths up to `longest` that fit into budget_s: two at least, where `longest`
        allows."""
        fitting = [tokens for tokens in LENGTHS if tokens <= longest]
        while len(fitting) > 2 and self.demo_s(fitting) > budget_s:
            fitting.pop()
        return tuple(fitting)


def measure(model: Any, ids: list[int], grid: ChunkGrid) -> Pace:
    """ids: at least 512 tokens. Runs the model a few times, without a warehouse."""
    prompt = torch.tensor([ids[:UNIT_TOKENS]], device=model.device)
    _compute(model, prompt[:, : grid.chunk_tokens], grid)  # the first run of a model is slower
    unit_s, cache = _compute(model, prompt, grid)
    with torch.no_grad():
        started = time.perf_counter()
        for _ in range(_DECODE_STEPS):
            model(input_ids=prompt[:, :1], use_cache=True, **with_cache(model, cache))
        step_s = (time.perf_counter() - started) / _DECODE_STEPS
    piece_s, _ = _compute(model, prompt, ChunkGrid(UNIT_TOKENS, UNIT_TOKENS))
    return Pace(unit_s, piece_s, step_s, grid.chunk_tokens)


def _compute(model: Any, prompt: Any, grid: ChunkGrid) -> tuple[float, Any]:
    cache = DynamicCache(config=model.config)
    started = time.perf_counter()
    with torch.no_grad():
        for first, end in grid.chunks(0, prompt.shape[1]):
            model(input_ids=prompt[:, first:end], use_cache=True, **with_cache(model, cache))
    return time.perf_counter() - started, cache

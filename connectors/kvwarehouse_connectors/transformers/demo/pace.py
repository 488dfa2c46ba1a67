"""How fast this machine is with this model: what a row of the demo will take, in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvwarehouse_connectors.transformers.grid import ChunkGrid
from kvwarehouse_connectors.transformers.support import with_cache

LENGTHS = (1024, 2048, 4096, 8192)
"""Fewer tokens are computed about as fast as anything else can be done: they would show little."""
UNIT_TOKENS = 512
ANSWER_TOKENS = 12
RUNS = 2
"""Of each cell, in turns; the better one counts."""

# A prompt of n units costs n, and attention to it grows with its square: fitted to 512 to 8,192
# tokens of an 82M model on two cores.
_ATTENTION = 0.09
_DECODE_STEPS = 2
WAYS_TO_LOAD = 3
RESTARTS = 2
"""Of the daemon, in each run: a kill, and a stop after which the DRAM tier is deleted."""


@dataclass(frozen=True)
class Pace:
    """unit_s: 512 tokens in chunks, as the demo computes them. piece_s: the same in one piece.
    step_s: one generated token. start_s: the daemon ended and started, and the model joined."""

    unit_s: float
    piece_s: float
    step_s: float
    chunk_tokens: int
    start_s: float = 0.0

    def prompt_s(self, tokens: int) -> float:
        """Expected seconds to compute a prompt."""
        units = tokens / UNIT_TOKENS
        return self.unit_s * max(0.0, units + _ATTENTION * units * (units - 1))

    def rest_s(self, tokens: int) -> float:
        """Expected seconds for the one or two chunks that are left after a load."""
        share = 1.5 * self.chunk_tokens / UNIT_TOKENS
        return self.unit_s * share * (1 + 2 * _ATTENTION * tokens / UNIT_TOKENS)

    def answer_s(self) -> float:
        return self.step_s * ANSWER_TOKENS

    def read_s(self, tokens: int, known: int) -> float:
        """Expected seconds to read on from a document's first `known` tokens, and to store."""
        return self.prompt_s(tokens) - self.prompt_s(known) + 2 * self.rest_s(tokens)

    def run_s(self, tokens: int) -> float:
        """One run of a row: computed once, loaded in every way, with the restarts between."""
        loaded = WAYS_TO_LOAD * self.rest_s(tokens)
        return self.prompt_s(tokens) + loaded + RESTARTS * self.start_s

    def row_s(self, tokens: int, known: int) -> float:
        """A whole row, whose first run writes answers, after a row of `known` tokens."""
        answers = (1 + WAYS_TO_LOAD) * self.answer_s()
        return self.read_s(tokens, known) + RUNS * self.run_s(tokens) + answers

    def seen(self, tokens: int, took_s: float) -> Pace:
        """This pace, corrected by what a prompt took: other work comes and goes."""
        times = took_s / self.prompt_s(tokens)
        return replace(self, unit_s=self.unit_s * times, step_s=self.step_s * times)


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

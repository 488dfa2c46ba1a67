"""Prompts of token ids for requests of block ids: equal ids give equal tokens, so equal prefixes.

A block's tokens come from a counter-based generator keyed with the seed and the block's id: nothing
is remembered, whatever the length of the trace. Stateless; thread-safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.errors import UsageError
from kvwarehouse.workloads.call import WorkloadCall

# Two different blocks are then never the same tokens, in a trace of any length.
_LEAST_BITS: Final = 56


@dataclass(frozen=True)
class PromptShape:
    """Of the prompts that are made: `shrink` divides all lengths, those of blocks too; longer
    prompts and outputs are cut. Ids of tokens are from `first_token` up to before `end_token`."""

    block_tokens: int
    shrink: int = 1
    most_prompt_tokens: int | None = None
    most_output_tokens: int | None = None
    first_token: int = 1_000
    end_token: int = 30_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shrink < 1 or self.block_tokens % self.shrink:
            raise UsageError(
                f"--shrink {self.shrink} does not divide blocks of {self.block_tokens} tokens; use"
                " one of their divisors",
                code="bad_prompts",
            )
        if not 0 <= self.first_token < self.end_token <= 2**32:
            raise UsageError(
                f"token ids from {self.first_token} to before {self.end_token} are none; give two"
                " rising numbers below the model's vocabulary",
                code="bad_prompts",
            )
        if self.page_tokens * math.log2(self.end_token - self.first_token) < _LEAST_BITS:
            raise UsageError(
                f"blocks of {self.page_tokens} tokens out of"
                f" {self.end_token - self.first_token} would often be equal by chance; shrink less,"
                " or use more token ids",
                code="bad_prompts",
            )

    @property
    def page_tokens(self) -> int:
        """Tokens of a block after shrinking."""
        return self.block_tokens // self.shrink


@dataclass(frozen=True)
class Prompt:
    """`tokens`: uint32; `blocks`: the ids that they were made of, the last perhaps in part."""

    tokens: NDArray[np.uint32]
    blocks: list[int]
    output_tokens: int


def prompt_of(request: WorkloadCall, shape: PromptShape) -> Prompt:
    """One token at least, and as many as the request's blocks have at most."""
    each = shape.page_tokens
    length = min(-(-request.input_tokens // shape.shrink), len(request.blocks) * each)
    if shape.most_prompt_tokens is not None:
        length = min(length, shape.most_prompt_tokens)
    length = max(1, length)
    # A request without blocks is one of its own kind: it shares what others without blocks have.
    blocks = list(request.blocks[: -(-length // each)]) or [0]
    tokens = np.concatenate([_block(block, each, shape) for block in blocks])[:length]
    output = max(1, -(-request.output_tokens // shape.shrink))
    if shape.most_output_tokens is not None:
        output = min(output, shape.most_output_tokens)
    return Prompt(tokens, blocks, output)


def _block(block: int, count: int, shape: PromptShape) -> NDArray[np.uint32]:
    raw = np.random.Philox(key=shape.seed << 64 | block).random_raw(-(-count // 2))
    words = raw.view(np.uint32)[:count]
    span = np.uint32(shape.end_token - shape.first_token) if shape.end_token < 2**32 else None
    if span is None:
        return words
    made: NDArray[np.uint32] = words % span + np.uint32(shape.first_token)
    return made

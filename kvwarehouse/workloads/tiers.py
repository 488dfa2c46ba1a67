"""Working sets around the size of a tier, each gone through more than once: the plainest picture of
what a tier holds. One set of 1.05 tiers and two passes is the public prefix-suffix-tuner; several
sets are a working-set sweep.

A prompt is a prefix, a breaker of 32 tokens, and a suffix that is the same text in all: behind
different prefixes it is different KV, so a cache by prefix shares nothing between prompts. Through
an LRU cache page by page a set that fits is hit whole from the second pass on, and one that does
not is never hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvwarehouse.workloads.call import Call, Ids, blocks_in

BREAKER_TOKENS = 32


@dataclass(frozen=True)
class Tiers:
    """`sets`: the size of each set, as a multiple of a tier of `tier_blocks` blocks; whole prompts,
    so a set is up to a prompt larger. Requests come at even intervals."""

    tier_blocks: int
    sets: Sequence[float]
    passes: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    requests_per_s: float
    block_tokens: int = 512

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + BREAKER_TOKENS + self.suffix_tokens

    def prompts(self, size: float) -> int:
        """Of one set."""
        per_prompt = blocks_in(self.prompt_tokens, self.block_tokens)
        return max(1, blocks_in(round(self.tier_blocks * size), per_prompt))

    def calls(self) -> Iterator[Call]:
        ids, chat = Ids(), 0
        per_prompt = blocks_in(self.prompt_tokens, self.block_tokens)
        for size in self.sets:
            first = ids.take(self.prompts(size) * per_prompt)[0]
            for _ in range(self.passes):
                for at in range(self.prompts(size)):
                    begin = first + at * per_prompt
                    blocks = range(begin, begin + per_prompt)
                    time_s = chat / self.requests_per_s
                    yield Call(time_s, self.prompt_tokens, self.output_tokens, blocks, chat)
                    chat += 1

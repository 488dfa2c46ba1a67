"""The cache groups of a model: which blocks a continuation needs.

A model's layers fall into groups, each with a block table of its own. Full attention needs all
blocks of a prefix; a sliding window its tail; a state-space layer one block, the state at the end.

Immutable; stateless.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    PREFIX = "prefix"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


@dataclass(frozen=True)
class CacheGroup:
    index: int
    """In the engine's list of groups."""
    rule: Rule
    block_tokens: int
    reach_tokens: int
    """Of a window or chunk; 0 otherwise."""
    hash_tokens: int
    """Tokens of one of the engine's block hashes; a block has one or more of them."""
    layer_names: tuple[str, ...]

    @property
    def chained(self) -> bool:
        """Whether a block is of use only with all blocks before it."""
        return self.rule is Rule.PREFIX

    @property
    def block_hashes(self) -> int:
        return self.block_tokens // self.hash_tokens

    def first_needed(self, tokens: int) -> int:
        """The first block that computing on after `tokens` tokens (a whole number of blocks)
        reads, as vLLM's cache managers have it (get_num_skipped_tokens)."""
        if self.rule is Rule.PREFIX:
            return 0
        if self.rule is Rule.WINDOW:
            return max(0, tokens - self.reach_tokens + 1) // self.block_tokens
        if self.rule is Rule.CHUNK:
            return tokens // self.reach_tokens * self.reach_tokens // self.block_tokens
        return max(0, tokens - 1) // self.block_tokens

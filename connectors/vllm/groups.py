"""vLLM's KV cache groups as this connector serves them: which blocks a continuation needs.

A model's layers fall into groups, each with a block table of its own. Full attention needs all
blocks of a prefix; a sliding window its tail; a state-space layer one block, the state at the end.

Immutable; stateless.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm import compat


class Rule(Enum):
    PREFIX = "prefix"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


@dataclass(frozen=True)
class CacheGroup:
    index: int
    """In vLLM's list of groups."""
    rule: Rule
    block_tokens: int
    reach_tokens: int
    """Of a window or chunk; 0 otherwise."""
    hash_tokens: int
    """Tokens of one of vLLM's block hashes; a block has one or more of them."""
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


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """The groups of a model, full attention first. Raises UsageError (code "unsupported") naming
    what cannot be served."""
    hash_tokens = kv_cache_config.hash_block_size
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        problem = compat.group_problem(group)
        if problem:
            raise unsupported(
                f"cache group {index} ({', '.join(group.layer_names[:2])}, ...)", problem
            )
        spec = compat.group_spec(group)
        rule, reach = _rule(spec)
        block_tokens = int(spec.block_size)
        each = int(hash_tokens or block_tokens)
        if block_tokens % each:
            raise unsupported(
                f"cache group {index}", f"has blocks of {block_tokens} tokens and hashes of {each}"
            )
        groups.append(CacheGroup(index, rule, block_tokens, reach, each, tuple(group.layer_names)))
    if not groups:
        raise unsupported("this model", "has no KV cache")
    return tuple(sorted(groups, key=lambda group: not group.chained))


def _rule(spec: Any) -> tuple[Rule, int]:
    kind = compat.spec_kind(spec)
    if kind == "sliding_window":
        return Rule.WINDOW, int(spec.sliding_window)
    if kind == "chunked_local":
        return Rule.CHUNK, int(spec.attention_chunk_size)
    if kind == "mamba":
        return Rule.STATE, 0
    return Rule.PREFIX, 0


def unsupported(what: str, problem: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"kvwarehouse cannot serve {what}: it {problem}. Start the engine without the connector, "
        "or see docs/vllm.md for what is served",
        code="unsupported",
    )

"""vLLM's KV cache groups as this connector serves them. Stateless."""

from __future__ import annotations

from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.vllm import compat


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

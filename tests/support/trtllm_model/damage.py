"""Damage to pages that an engine of the model stored, where the daemon keeps them in DRAM."""

from __future__ import annotations

from collections.abc import Sequence

from kvwarehouse_bench.harness.serving import Serving
from testkit.damage import find_one
from trtllm_model.pools import page_of


def spoil(
    serving: Serving, tokens: Sequence[int], *, block: int, rank: int, block_tokens: int = 8
) -> None:
    """One bit of what a rank stored of one block of a prompt, of an engine with a pool tensor."""
    page = page_of(tokens, block, rank, block_tokens)
    arena = [path for path in serving.arena_dir.rglob("arena") if path.is_file()]
    find_one(arena, page).flip(3, at=page.size // 2)

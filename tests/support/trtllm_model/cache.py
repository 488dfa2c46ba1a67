"""A KV cache manager: which block of which pool a request has, and what the engine itself reuses.

V1 gives a request blocks for all of its prompt at once; V2 chunk by chunk, and takes back blocks
that a window has passed [doc].
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from trtllm_model.attention import Prefixes
from trtllm_model.pools import Pool
from trtllm_model.request import LlmRequest

ABSENT = -1  # [doc] BAD_PAGE_INDEX: in place, so that entry i is always block i


class Cache:
    def __init__(self, memory: Any, block_tokens: int, *, chunked: bool) -> None:
        self.pools: list[Pool] = memory.pools
        self.block_tokens = block_tokens
        self.chunked = chunked
        self.tables: dict[int, list[list[int]]] = {}
        self._prefixes: dict[int, Prefixes] = {}
        # Blocks of ended requests that the engine may use again itself, the coldest first: V1 only.
        self._reusable: OrderedDict[tuple[Any, bytes], int] = OrderedDict()

    @property
    def grouped(self) -> bool:
        return self.chunked

    def table(self, request: LlmRequest) -> list[list[int]]:
        return [list(table) for table in self.tables[request.request_id]]

    def room(self) -> int:
        """Blocks that can be had in the fullest pool."""
        return min(len(pool.free) for pool in self.pools) + len(self._reusable)

    def idle_blocks(self) -> list[int]:
        """Per pool, those that no request has."""
        return [len(pool.free) + len(self._reusable) for pool in self.pools]

    def forget_reusable(self) -> None:
        """As other requests would have it: nothing is left for the engine's own reuse."""
        self.pools[0].free += self._reusable.values()
        self._reusable.clear()

    def local_match(self, request: LlmRequest) -> tuple[int, list[int]]:
        """Tokens and blocks of its prompt that the engine has itself; taken out of reuse."""
        blocks: list[int] = []
        while (len(blocks) + 1) * self.block_tokens < request.prompt_len:
            end = (len(blocks) + 1) * self.block_tokens - 1
            slot = self._reusable.pop((request.model.salt, self._digest(request, end)), None)
            if slot is None:
                break
            blocks.append(slot)
        return len(blocks) * self.block_tokens, blocks

    def begin(self, request: LlmRequest, blocks: list[int]) -> None:
        self.tables[request.request_id] = [list(blocks) for _ in self.pools]

    def grow(self, request: LlmRequest, tokens: int) -> bool:
        """Blocks for its first `tokens` tokens. False: there is no room, nothing was taken."""
        tables = self.tables[request.request_id]
        wanted = -(-tokens // self.block_tokens)
        if any(wanted - len(t) > self._left(p) for t, p in zip(tables, self.pools, strict=True)):
            return False
        for table, pool in zip(tables, self.pools, strict=True):
            while len(table) < wanted:
                slot = self._take(pool)
                pool.scribble(slot)
                table.append(slot)
        return True

    def drop_passed(self, request: LlmRequest, position: int) -> None:
        """V2: blocks that no token from `position` on attends to have no page any more."""
        for table, pool in zip(self.tables[request.request_id], self.pools, strict=True):
            if pool.window is None:
                continue
            for block in range(
                min(len(table), max(0, position - pool.window + 1) // self.block_tokens)
            ):
                if table[block] != ABSENT:
                    pool.free.append(table[block])
                    table[block] = ABSENT

    def release(self, request: LlmRequest, *, reusable: bool) -> None:
        tables = self.tables.pop(request.request_id)
        for table, pool in zip(tables, self.pools, strict=True):
            for block, slot in enumerate(table):
                if slot == ABSENT:
                    continue
                end = (block + 1) * self.block_tokens
                if reusable and not self.chunked and end < len(request.get_tokens(0)):
                    name = (request.model.salt, self._digest(request, end - 1))
                    if name not in self._reusable:
                        self._reusable[name] = slot
                        continue
                pool.free.append(slot)
        self._prefixes.pop(request.request_id, None)

    def compute(self, request: LlmRequest, begin: int, end: int) -> None:
        """Attention over what is there, then KV of the tokens begin to end - 1."""
        self.check(request, begin)
        tokens = request.get_tokens(0)
        for table, pool in zip(self.tables[request.request_id], self.pools, strict=True):
            for position in range(begin, end):
                slot = table[position // self.block_tokens]
                if slot != ABSENT:
                    digest = self._prefix(request).digest(tokens, position)
                    pool.write(slot, position % self.block_tokens, digest)

    def check(self, request: LlmRequest, computed: int) -> None:
        """AssertionError where KV that the next token attends to is not what it has to be."""
        tokens = request.get_tokens(0)
        for group, (table, pool) in enumerate(
            zip(self.tables[request.request_id], self.pools, strict=True)
        ):
            first = 0 if pool.window is None else max(0, computed - pool.window + 1)
            for position in range(first, computed):
                slot = table[position // self.block_tokens]
                digest = self._prefix(request).digest(tokens, position)
                assert slot != ABSENT, f"group {group} lost block {position // self.block_tokens}"
                assert pool.right(slot, position % self.block_tokens, digest), (
                    f"request {request.request_id}: wrong KV in group {group} at token {position}"
                    f" of {computed}"
                )

    def _digest(self, request: LlmRequest, position: int) -> bytes:
        return self._prefix(request).digest(request.get_tokens(0), position)

    def _prefix(self, request: LlmRequest) -> Prefixes:
        return self._prefixes.setdefault(request.request_id, Prefixes())

    def _left(self, pool: Pool) -> int:
        return len(pool.free) + len(self._reusable)

    def _take(self, pool: Pool) -> int:
        if not pool.free:
            pool.free.append(self._reusable.popitem(last=False)[1])
        return pool.free.pop(0)

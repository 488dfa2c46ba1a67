"""The keys of a request's blocks: a SHA-256 chain over its salt and its token ids.

TensorRT-LLM's own block hashes are 64 bits, and its newer cache manager tells none. Each key names
the whole prefix up to its block, and is what a loaded page is confirmed against. One per request;
not thread-safe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

SCHEME = "kvwarehouse-trtllm/sha256-1"
_ROOT = b"kvwarehouse trtllm block chain 1"


class PromptKeys:
    """Implements core.prefix_matcher.BlockKeys: every group has blocks of `block_tokens` tokens."""

    def __init__(self, salt: bytes, block_tokens: int) -> None:
        self._root = hashlib.sha256(_ROOT + salt).digest()
        self._block_tokens = block_tokens
        self._tokens: list[int] = []
        self._keys: list[bytes] = []

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens are 0 to 2^32 - 1; raises ValueError on others."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 32:
            raise ValueError("a token id is out of range; ids are 0 to 4294967295")
        self._tokens += tokens
        step = self._block_tokens
        begin, end = len(self._keys), len(self._tokens) // step
        if begin == end:
            return
        fresh = np.array(self._tokens[begin * step : end * step], "<u4").reshape(-1, step)
        key = self._keys[-1] if self._keys else self._root
        for row in fresh:
            key = hashlib.sha256(key + row.tobytes()).digest()
            self._keys.append(key)

    def replace(self, tokens: Sequence[int]) -> None:
        """All tokens anew; nothing is computed where they only went on."""
        known = self.tokens
        if list(tokens[:known]) != self._tokens:
            self._tokens, self._keys, known = [], [], 0
        self.extend(tokens[known:])

    def count(self, block_hashes: int) -> int:
        return len(self._keys)

    def keys(self, begin: int, end: int, block_hashes: int) -> Sequence[bytes]:
        return self._keys[begin:end]

"""The keys of a request's blocks.

vLLM's own block hashes are used where they are a cryptographic digest of a reproducible chain:
each then names its whole prefix, media, salt and adapter name, and is what a loaded page is
confirmed against. Where they are not (xxhash: not collision resistant, and seeded at random for
each process), the same chain is made here with SHA-256.

What vLLM's hashes leave out is twisted in: which *weights* an adapter had, the epoch of an engine
whose weights or cache were reset while it ran, and the tokens behind a block on which a draft's KV
in it depends.

One per request; not thread-safe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvwarehouse_connectors.vllm import compat

CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
OWN_SCHEME = "kvwarehouse-vllm/sha256-1"
_OWN_ROOT = b"kvwarehouse vllm block chain 1"

KeysOf = Callable[[Any], Sequence[bytes]]


def chain_for(algorithm: str, hash_tokens: int) -> Callable[[], KeysOf]:
    """Makes, for each new request, the function from the request to its hashes so far."""
    if algorithm in CRYPTOGRAPHIC:
        return lambda: _engine_hashes
    return lambda: OwnChain(hash_tokens)


def _engine_hashes(request: Any) -> Sequence[bytes]:
    hashes: Sequence[bytes] = request.block_hashes
    return hashes


class OwnChain:
    """SHA-256 over parent, token ids (little-endian, 4 bytes each) and vLLM's extra keys."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._hashes: list[bytes] = []
        self._sources: list[bytes] = []  # vLLM's own, of the same blocks
        self._mm_index = 0

    def __call__(self, request: Any) -> Sequence[bytes]:
        step = self._hash_tokens
        known = _still(self._sources, request.block_hashes)
        if known < len(self._hashes):
            self._mm_index = 0
        del self._hashes[known:]
        for begin in range(known * step, request.num_tokens - step + 1, step):
            end = begin + step
            extra, self._mm_index = compat.extra_keys(request, begin, end, self._mm_index)
            state = hashlib.sha256(self._hashes[-1] if self._hashes else _OWN_ROOT)
            state.update(np.asarray(request.all_token_ids[begin:end], "<u4").tobytes())
            state.update(repr(extra).encode())
            self._hashes.append(state.digest())
        self._sources[known:] = request.block_hashes[known : len(self._hashes)]
        return self._hashes


def _still(sources: list[bytes], hashes: Sequence[bytes]) -> int:
    """How many of `sources` are still the first of `hashes`; cuts the others off. Hashes only grow,
    but for sessions whose last tokens are taken back."""
    known = min(len(sources), len(hashes))
    while known and sources[known - 1] != hashes[known - 1]:
        known -= 1
    del sources[known:]
    return known


class RequestKeys:
    """Implements core.prefix_matcher.BlockKeys for groups of different block sizes.

    twist: b"" for none. hash_tokens: of one hash. lookahead_tokens: so many tokens behind a block
    belong to its key, and until they are known it has none."""

    def __init__(
        self,
        request: Any,
        hashes: KeysOf,
        twist: bytes,
        hash_tokens: int = 0,
        lookahead_tokens: int = 0,
    ) -> None:
        self._request = request
        self._hashes = hashes
        self._twist = twist
        self._hash_tokens = hash_tokens
        self._lookahead_tokens = lookahead_tokens
        self._twisted: list[bytes] = []
        self._sources: list[bytes] = []

    def count(self, block_hashes: int) -> int:
        """Whole blocks whose tokens are all known, and those behind that belong to their keys.
        block_hashes: hashes of a block."""
        return len(self._known()) // block_hashes

    def keys(self, begin: int, end: int, block_hashes: int) -> Sequence[bytes]:
        """Keys of blocks begin to end - 1: of each the last hash inside it, which names the whole
        prefix up to there."""
        hashes = self._all()
        if block_hashes == 1:
            return hashes[begin:end]
        return hashes[(begin + 1) * block_hashes - 1 : end * block_hashes : block_hashes]

    def _all(self) -> Sequence[bytes]:
        hashes = self._known()
        if not self._twist and not self._lookahead_tokens:
            return hashes
        known = _still(self._sources, hashes)
        del self._twisted[known:]
        for number in range(known, len(hashes)):
            state = hashlib.blake2b(hashes[number], digest_size=32, key=self._twist)
            state.update(self._behind((number + 1) * self._hash_tokens))
            self._sources.append(hashes[number])
            self._twisted.append(state.digest())
        return self._twisted

    def _known(self) -> Sequence[bytes]:
        hashes = self._hashes(self._request)
        if not self._lookahead_tokens:
            return hashes
        usable = (self._request.num_tokens - self._lookahead_tokens) // self._hash_tokens
        return hashes[: max(0, usable)] if usable < len(hashes) else hashes

    def _behind(self, end: int) -> bytes:
        tokens = self._request.all_token_ids[end : end + self._lookahead_tokens]
        return np.asarray(tokens, "<u4").tobytes()

"""KV that follows from its prefix: so every byte in a cache can be judged, wherever it came
from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Prefixes:
    """A digest for each prefix of a request's tokens."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._digests: list[bytes] = []

    def digest(self, tokens: Sequence[int], position: int) -> bytes:
        """Of tokens[: position + 1]."""
        for at in range(len(self._digests), position + 1):
            before = self._digests[-1] if at else b""
            self._digests.append(
                hashlib.blake2b(before + tokens[at].to_bytes(4, "little"), digest_size=8).digest()
            )
            self._tokens.append(tokens[at])
        assert self._tokens[position] == tokens[position], "a request's tokens changed"
        return self._digests[position]


def kv_of(digest: bytes, owner: int, size_bytes: int) -> Bytes:
    """What attention computes for the last token of a prefix. owner: the rank, or -1 for what every
    rank has alike; with the layer group."""
    # Many times as quick as a generator of random numbers that is made for each token.
    seed = digest + (owner + 1).to_bytes(8, "little")
    return np.frombuffer(hashlib.shake_128(seed).digest(size_bytes), np.uint8)

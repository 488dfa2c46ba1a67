"""SGLang's page keys as the warehouse has them.

A key of SGLang is the SHA-256 of the page's whole prefix, in hexadecimal: those 32 bytes are used
as they are, and each page stands alone. SGLang can also pass the keys before a page
(hicache_storage_pass_prefix_keys), which could make chains of them, but they are not to be
believed: 0.5.23 leaves out those of the last node that it has when it prefetches, and of the pages
that it trims in buffer mode, and a decode offload passes none.

Stateless.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass

import kvwarehouse as kvw

_HEX = frozenset(string.hexdigits)
_DIGEST_CHARS = 64


def page_key(key: str) -> bytes:
    """32 bytes. A key that is no digest, as other callers of the interface may pass, is hashed."""
    if len(key) == _DIGEST_CHARS and _HEX.issuperset(key):
        return bytes.fromhex(key)
    return hashlib.sha256(b"kvwarehouse sglang text key" + key.encode()).digest()


@dataclass(frozen=True)
class Span:
    """Consecutive pages of one prompt."""

    keys: Sequence[bytes]

    @staticmethod
    def of(keys: Sequence[str]) -> Span:
        """By SGLang's keys."""
        return Span([page_key(key) for key in keys])

    def __len__(self) -> int:
        return len(self.keys)

    def cut(self, begin: int, end: int) -> Span:
        return Span(self.keys[begin:end])

    def runs(self) -> list[kvw.KeyRun]:
        return [kvw.KeyRun([key]) for key in self.keys]

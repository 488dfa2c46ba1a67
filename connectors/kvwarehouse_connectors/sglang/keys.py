"""SGLang's page keys as the warehouse has them.

A key of SGLang is the SHA-256 of the page's whole prefix, in hexadecimal: those 32 bytes are used
as they are. Where SGLang also passes the keys before (hicache_storage_pass_prefix_keys), pages are
stored as a chain: then a prefix leaves the warehouse from its end. Without, each stands alone.

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
    position: int | None = None
    """Of the first within its prompt; None where it is not known, and each page stands alone."""
    parent: bytes | None = None
    """The key of the page before the first."""

    @staticmethod
    def of(keys: Sequence[str], before: Sequence[str] | None = None) -> Span:
        """By SGLang's keys. before: of all pages of the prompt before these, where known."""
        named = [page_key(key) for key in keys]
        if before is None:
            return Span(named)
        return Span(named, len(before), page_key(before[-1]) if before else None)

    @property
    def chained(self) -> bool:
        return self.position is not None

    def __len__(self) -> int:
        return len(self.keys)

    def cut(self, begin: int, end: int) -> Span:
        keys = self.keys[begin:end]
        if self.position is None:
            return Span(keys)
        return Span(keys, self.position + begin, self.keys[begin - 1] if begin else self.parent)

    def runs(self) -> list[kvw.KeyRun]:
        if self.position is None:
            return [kvw.KeyRun([key]) for key in self.keys]
        return [kvw.KeyRun(list(self.keys), self.position, self.parent)]

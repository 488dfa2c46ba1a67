"""LMCache's object keys as the warehouse has them.

A chunk's hash chains all chunks before it; it is used as it is. A user's salt (cache_salt) is
mixed into it: there may be as many as users, and a namespace each would be too many. Model, rank
and group are the namespace's (identity.py).

Stateless.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

LEAST_HASH_BYTES = 16
"""Shorter hashes (Python's own, to which LMCache falls back) may be the same for other tokens."""
_MOST_HASH_BYTES = 64


class ObjectKey(Protocol):
    """What is used of LMCache's, which are hashable."""

    def __hash__(self) -> int: ...
    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


def page_key(key: ObjectKey) -> bytes | None:
    """16 to 64 bytes; None where the hash is too short to tell chunks apart."""
    digest = key.chunk_hash
    if len(digest) < LEAST_HASH_BYTES:
        return None
    if not key.cache_salt and len(digest) <= _MOST_HASH_BYTES:
        return digest
    salt = key.cache_salt.encode()
    mixed = hashlib.blake2b(digest_size=32, person=b"kvw lmcache salt")
    mixed.update(len(salt).to_bytes(4, "little") + salt + digest)
    return mixed.digest()

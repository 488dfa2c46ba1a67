"""Prefixes on the wire: token ids as packed little-endian uint32, or an engine's own keys.

Stateless; thread-safe. Copies once in each direction.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.errors import UsageError
from kvwarehouse.wire.generated import warehouse_pb2 as pb
from kvwarehouse.wire.limits import MAX_KEY_BYTES, MAX_KEYS, MAX_TOKENS

_PACKED = np.dtype("<u4")


def prefix_to_wire(tokens: NDArray[Any] | None, keys: Sequence[bytes] | None) -> pb.Prefix:
    """`tokens`: one-dimensional unsigned or signed integers, already checked to be in range; or
    `keys`, one a page. Exactly one of them. Raises UsageError beyond the bounds of the wire."""
    if (tokens is None) == (keys is None):
        raise UsageError("a prefix is either tokens or keys, not both and not none of them")
    if tokens is not None:
        _check_count("too_many_tokens", "token ids", len(tokens), MAX_TOKENS)
        return pb.Prefix(tokens=np.ascontiguousarray(tokens, dtype=_PACKED).tobytes())
    assert keys is not None
    _check_keys(keys)
    return pb.Prefix(keys=pb.EngineKeys(keys=keys))


def prefix_from_wire(prefix: pb.Prefix) -> tuple[NDArray[np.uint32] | None, list[bytes] | None]:
    """(tokens, None) or (None, keys). Raises UsageError on a prefix that is absent, cut in the
    middle of a token, or beyond the bounds of the wire."""
    which = prefix.WhichOneof("by")
    if which == "tokens":
        if len(prefix.tokens) % _PACKED.itemsize:
            raise UsageError(
                f"tokens has {len(prefix.tokens)} bytes, which is no whole number of packed uint32",
                code="bad_tokens",
            )
        tokens = np.frombuffer(prefix.tokens, dtype=_PACKED)
        _check_count("too_many_tokens", "token ids", len(tokens), MAX_TOKENS)
        return tokens, None
    if which == "keys":
        keys = list(prefix.keys.keys)
        _check_keys(keys)
        return None, keys
    raise UsageError(
        "the request has no prefix: set prefix.tokens or prefix.keys", code="no_prefix"
    )


def _check_keys(keys: Sequence[bytes]) -> None:
    _check_count("too_many_keys", "keys", len(keys), MAX_KEYS)
    for place, key in enumerate(keys):
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise UsageError(
                f"key {place} has {len(key)} bytes; an engine's key has 1 to {MAX_KEY_BYTES}",
                code="bad_key",
                context={"position": place, "bytes": len(key)},
            )


def _check_count(code: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise UsageError(
            f"a prefix of {count} {what} is over the bound of one call, {most}; pass a shorter one",
            code=code,
            context={"count": count, "most": most},
        )

"""Token ids as callers have them, turned into the one array that the core reads.

Stateless; thread-safe. No Python work per token where the caller has an array.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.errors import UsageError
from kvwarehouse.types import MAX_TOKEN
from kvwarehouse.wire import MAX_TOKENS


def token_array(tokens: Any) -> NDArray[np.uint32]:
    """`tokens` as a contiguous uint32 array, one-dimensional.

    Takes any sequence of integers (list, tuple, range), any buffer or array of an integer type
    (numpy of all integer types, array.array, memoryview, a torch tensor on the CPU). Contiguous
    uint32 and int32 are not copied. Raises UsageError (code "bad_tokens") that names the first
    wrong index and value: out of 0 to 2^32 - 1, floats, bools, text, more than one dimension; code
    "too_many_tokens" beyond 1,048,576."""
    found = _as_array(tokens)
    if found.ndim != 1:
        raise _bad(f"tokens has {found.ndim} dimensions {found.shape}; pass one prompt's ids, flat")
    if found.size == 0:
        return np.empty(0, np.uint32)
    _check_count("too_many_tokens", "token ids", len(found), MAX_TOKENS)
    if found.dtype.kind not in "iu":
        raise _bad(f"tokens is of type {found.dtype}; pass integers{_first_odd(tokens)}")
    return _narrowed(np.ascontiguousarray(found.astype(found.dtype.newbyteorder("="), copy=False)))


def _as_array(tokens: Any) -> NDArray[Any]:
    if isinstance(tokens, np.ndarray):
        return tokens
    if isinstance(tokens, list | tuple | range):
        _check_count("too_many_tokens", "token ids", len(tokens), MAX_TOKENS)
        return _from_sequence(tokens)
    if isinstance(tokens, str | bytes | bytearray | dict | set | frozenset):
        raise _bad(f"tokens is of type {type(tokens).__name__}; pass a sequence of integer ids")
    try:
        # Buffers, __array__ and __dlpack__ (torch, without importing it), without a copy.
        return np.asarray(tokens)
    except (
        Exception
    ) as error:  # whatever a foreign __array__ raises (torch: TypeError, RuntimeError)
        raise _bad(
            f"tokens is of type {type(tokens).__name__} and cannot be read as an array ({error});"
            " pass integer ids in host memory"
        ) from error


def _from_sequence(tokens: Sequence[Any]) -> NDArray[Any]:
    """array("I") converts three times as fast as numpy, and refuses what is out of range; the loop
    then only has to say what was wrong."""
    try:
        if tokens and bool not in set(map(type, tokens)):
            return np.frombuffer(array.array("I", tokens), np.uint32)
    except (TypeError, OverflowError, ValueError):
        pass
    for place, token in enumerate(tokens):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise _bad(
                f"tokens[{place}] = {token!r} is of type {type(token).__name__}; pass integers",
                place,
            )
        if not 0 <= token.__index__() <= MAX_TOKEN:
            raise _out_of_range(place, token)
    return np.array([token.__index__() for token in tokens], np.uint32)


def _narrowed(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    """uint32 of contiguous native integers, by one pass over them: a negative number, read as
    unsigned, is larger than any that is allowed."""
    if tokens.dtype == np.uint32:
        return tokens
    unsigned = tokens.view(tokens.dtype.str.replace("i", "u"))
    largest = MAX_TOKEN
    if tokens.dtype.kind == "i" and tokens.dtype.itemsize <= 4:
        largest = int(np.iinfo(tokens.dtype).max)
    if int(unsigned.max()) > largest:
        place = int(np.argmax(unsigned > largest))
        raise _out_of_range(place, tokens[place])
    if tokens.dtype.itemsize == 4:
        return unsigned
    return unsigned.astype(np.uint32)


def _check_count(code: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise UsageError(
            f"{count} {what} are over the bound of one call, {most}; pass a shorter prefix",
            code=code,
            context={"count": count, "most": most},
        )


def _first_odd(tokens: Any) -> str:
    return f" (tokens[0] = {tokens[0]!r})" if isinstance(tokens, list | tuple) else ""


def _out_of_range(place: int, token: Any) -> UsageError:
    return _bad(f"tokens[{place}] = {int(token)} is out of range; ids are 0 to {MAX_TOKEN}", place)


def _bad(message: str, place: int | None = None) -> UsageError:
    context = {} if place is None else {"position": place}
    return UsageError(message, code="bad_tokens", context=context)

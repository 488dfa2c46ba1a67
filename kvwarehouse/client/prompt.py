"""A prompt as callers have it (token ids, an engine's own block hashes, or runs of these), turned
into what the core reads, and the pages that it makes.

Stateless; thread-safe. No Python work per token where the caller has an array, nor per key where
the keys are good: a scheduler asks for thousands a step, and the loop that names the bad one runs
only when there is one.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, index
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.errors import UsageError
from kvwarehouse.types import MAX_TOKEN, KeyRun, Namespace
from kvwarehouse.wire import MAX_KEY_BYTES, MAX_KEYS, MAX_TOKENS

_NO_INTEGER: Final = (TypeError, ValueError, RuntimeError)
"""What __index__ raises of what is no integer: arrays of several, torch's tensors without data."""


class Prefix(NamedTuple):
    """Exactly one of `tokens` (uint32, flat, contiguous) and `keys` is set."""

    tokens: NDArray[np.uint32] | None
    keys: list[bytes] | Runs | None
    pages: int
    """Whole pages; tokens after the last whole page do not count."""


def prefix_of(space: Namespace, tokens: Any, keys: Any) -> Prefix:
    """Raises UsageError on both, on neither, and on what token_array and checked_keys refuse."""
    if (tokens is None) == (keys is None):
        raise UsageError(
            "pass either tokens or keys=, " + ("not both" if keys is not None else "one of them"),
            code="bad_prefix",
        )
    if keys is not None:
        checked = checked_keys(keys)
        return Prefix(None, checked, len(checked.keys if isinstance(checked, Runs) else checked))
    ids = token_array(tokens)
    return Prefix(ids, None, len(ids) // space.page_tokens)


def token_array(tokens: Any) -> NDArray[np.uint32]:
    """`tokens` as a contiguous uint32 array, one-dimensional.

    Takes any sequence of integers (list, tuple, range), any buffer or array of an integer type
    (numpy of all integer types, array.array, memoryview, a torch tensor on the CPU). Contiguous
    uint32 and int32 are not copied. Raises UsageError (code "bad_tokens") that names the first
    wrong index and value: out of 0 to 2^32 - 1, floats, bools, text, more than one dimension; code
    "too_many_tokens" beyond 1,048,576."""
    found = _as_array(tokens)
    if found.ndim != 1:
        raise _bad_tokens(
            f"tokens has {found.ndim} dimensions {found.shape}; pass one prompt's ids, flat"
        )
    if found.size == 0:
        return np.empty(0, np.uint32)
    _check_count("token ids", len(found), MAX_TOKENS, "a shorter prefix", code="too_many_tokens")
    if found.dtype.kind not in "iu":
        raise _bad_tokens(f"tokens is of type {found.dtype}; pass integers{_first_odd(tokens)}")
    return _narrowed(np.ascontiguousarray(found.astype(found.dtype.newbyteorder("="), copy=False)))


def _as_array(tokens: Any) -> NDArray[Any]:
    if isinstance(tokens, np.ndarray):
        return tokens
    if isinstance(tokens, list | tuple | range):
        _check_count(
            "token ids", len(tokens), MAX_TOKENS, "a shorter prefix", code="too_many_tokens"
        )
        return _from_sequence(tokens)
    if isinstance(tokens, str | bytes | bytearray | dict | set | frozenset):
        raise _bad_tokens(
            f"tokens is of type {type(tokens).__name__}; pass a sequence of integer ids"
        )
    try:
        # Buffers, __array__ and __dlpack__ (torch, without importing it), without a copy.
        return np.asarray(tokens)
    except (
        Exception
    ) as error:  # whatever a foreign __array__ raises (torch: TypeError, RuntimeError)
        raise _bad_tokens(
            f"tokens is of type {type(tokens).__name__} and cannot be read as an array ({error});"
            " pass integer ids in host memory"
        ) from error


def _from_sequence(tokens: Sequence[Any]) -> NDArray[Any]:
    """array("I") converts three times as fast as numpy, and refuses what is out of range; the loop
    then only has to say what was wrong."""
    try:
        if tokens and bool not in set(map(type, tokens)):
            return np.frombuffer(array.array("I", tokens), np.uint32)
    except (OverflowError, *_NO_INTEGER):
        pass
    return np.array([_checked_token(place, token) for place, token in enumerate(tokens)], np.uint32)


def _checked_token(place: int, token: Any) -> int:
    try:
        number = None if isinstance(token, bool) else index(token)
    except _NO_INTEGER:
        number = None
    if number is None:
        raise _bad_tokens(
            f"tokens[{place}] = {token!r} is of type {type(token).__name__}; pass integers", place
        )
    if not 0 <= number <= MAX_TOKEN:
        raise _out_of_range(place, number)
    return number


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


def _check_count(what: str, count: int, most: int, instead: str, *, code: str) -> None:
    if count > most:
        raise UsageError(
            f"{count} {what} are over the bound of one call, {most}; pass {instead}",
            code=code,
            context={"count": count, "most": most},
        )


def _first_odd(tokens: Any) -> str:
    return f" (tokens[0] = {tokens[0]!r})" if isinstance(tokens, list | tuple) else ""


def _out_of_range(place: int, token: Any) -> UsageError:
    return _bad_tokens(
        f"tokens[{place}] = {int(token)} is out of range; ids are 0 to {MAX_TOKEN}", place
    )


def _bad_tokens(message: str, place: int | None = None) -> UsageError:
    context = {} if place is None else {"position": place}
    return UsageError(message, code="bad_tokens", context=context)


Keys: TypeAlias = Sequence[bytes] | Sequence[KeyRun]
"""One prompt's pages from its root, or pages of several prompts in the order given."""


class Runs(NamedTuple):
    """Runs as the native client takes them; the last three have an entry for each run."""

    keys: list[bytes]
    """Of all runs, one after another."""
    pages: list[int]
    positions: list[int]
    parents: list[bytes | None]


def checked_keys(keys: Any) -> list[bytes] | Runs:
    """Raises UsageError (code "bad_key") on anything that is not a sequence of 1 to 64 bytes each
    or of KeyRuns of those, "too_many_keys" beyond 65,536 keys or runs."""
    if isinstance(keys, bytes | bytearray | str) or not isinstance(keys, Sequence):
        raise _bad_key(
            f"keys is of type {type(keys).__name__}; pass a list of bytes, one a page, or of"
            " kvwarehouse.KeyRun"
        )
    _check_count("keys", len(keys), MAX_KEYS, "fewer at a time", code="too_many_keys")
    if len(keys) and isinstance(keys[0], KeyRun):
        return _runs(list(keys))
    return _checked_list("keys", list(keys))


def _runs(runs: list[Any]) -> Runs:
    for number, run in enumerate(runs if set(map(type, runs)) != {KeyRun} else ()):
        if not isinstance(run, KeyRun):
            raise _bad_key(
                f"keys[{number}] is {type(run).__name__} and keys[0] a KeyRun; pass one kind",
                number,
            )
    lists = list(map(attrgetter("keys"), runs))
    for number, listed in enumerate(lists if set(map(type, lists)) - {list, tuple} else ()):
        if isinstance(listed, bytes | bytearray | str) or not isinstance(listed, Sequence):
            raise _bad_key(
                f"keys[{number}].keys is of type {type(listed).__name__}; pass a list of bytes",
                number,
            )
    keys = list(chain.from_iterable(lists))
    _check_count("keys", len(keys), MAX_KEYS, "fewer at a time", code="too_many_keys")
    positions = list(map(attrgetter("position"), runs))
    parents = list(map(attrgetter("parent"), runs))
    if any(positions):
        _checked_list("parents of runs", [parent for parent in parents if parent is not None])
    return Runs(_checked_list("keys of all runs", keys), list(map(len, lists)), positions, parents)


def _checked_list(name: str, keys: list[Any]) -> list[bytes]:
    if set(map(type, keys)) <= {bytes}:
        sizes = set(map(len, keys))
        if not sizes or (min(sizes) >= 1 and max(sizes) <= MAX_KEY_BYTES):
            return keys
    for place, key in enumerate(keys):
        if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
            shown = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise _bad_key(
                f"{name}[{place}] is {shown}; an engine's key is 1 to {MAX_KEY_BYTES} bytes", place
            )
    return keys


def _bad_key(message: str, place: int | None = None) -> UsageError:
    context = {} if place is None else {"position": place}
    return UsageError(message, code="bad_key", context=context)

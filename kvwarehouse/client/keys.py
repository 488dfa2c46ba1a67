"""An engine's own block hashes as callers have them: a list from a prompt's root, or runs.

Stateless; thread-safe. No Python work per key where they are good: a scheduler asks for thousands
a step, and the loop that names the bad one runs only when there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from kvwarehouse.errors import UsageError
from kvwarehouse.types import KeyRun
from kvwarehouse.wire import MAX_KEY_BYTES, MAX_KEYS

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
        raise _bad(
            f"keys is of type {type(keys).__name__}; pass a list of bytes, one a page, or of"
            " kvwarehouse.KeyRun"
        )
    _check_count("keys", len(keys))
    if len(keys) and isinstance(keys[0], KeyRun):
        return _runs(list(keys))
    return _checked("keys", list(keys))


def _runs(runs: list[Any]) -> Runs:
    for number, run in enumerate(runs if set(map(type, runs)) != {KeyRun} else ()):
        if not isinstance(run, KeyRun):
            raise _bad(
                f"keys[{number}] is {type(run).__name__} and keys[0] a KeyRun; pass one kind",
                number,
            )
    lists = list(map(attrgetter("keys"), runs))
    for number, listed in enumerate(lists if set(map(type, lists)) - {list, tuple} else ()):
        if isinstance(listed, bytes | bytearray | str) or not isinstance(listed, Sequence):
            raise _bad(
                f"keys[{number}].keys is of type {type(listed).__name__}; pass a list of bytes",
                number,
            )
    keys = list(chain.from_iterable(lists))
    _check_count("keys", len(keys))
    positions = list(map(attrgetter("position"), runs))
    parents = list(map(attrgetter("parent"), runs))
    if any(positions):
        _checked("parents of runs", [parent for parent in parents if parent is not None])
    return Runs(_checked("keys of all runs", keys), list(map(len, lists)), positions, parents)


def _checked(name: str, keys: list[Any]) -> list[bytes]:
    if set(map(type, keys)) <= {bytes}:
        sizes = set(map(len, keys))
        if not sizes or (min(sizes) >= 1 and max(sizes) <= MAX_KEY_BYTES):
            return keys
    for place, key in enumerate(keys):
        if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
            shown = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise _bad(
                f"{name}[{place}] is {shown}; an engine's key is 1 to {MAX_KEY_BYTES} bytes", place
            )
    return keys


def _check_count(what: str, count: int) -> None:
    if count > MAX_KEYS:
        raise UsageError(
            f"{count} {what} are over the bound of one call, {MAX_KEYS}; pass fewer at a time",
            code="too_many_keys",
            context={"count": count, "most": MAX_KEYS},
        )


def _bad(message: str, place: int | None = None) -> UsageError:
    context = {} if place is None else {"position": place}
    return UsageError(message, code="bad_key", context=context)

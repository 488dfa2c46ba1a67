"""The pages of a call as they are passed on: checked tokens or keys, and how many pages they make.

Immutable; thread-safe.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.keys import Runs, checked_keys
from kvwarehouse.client.prompt import token_array
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Namespace


@dataclass(frozen=True, eq=False)
class Prefix:
    """Exactly one of `tokens` (uint32, flat, contiguous) and `keys` is set."""

    tokens: NDArray[np.uint32] | None
    keys: list[bytes] | Runs | None
    pages: int
    """Whole pages; tokens after the last whole page do not count."""


@dataclass(frozen=True)
class Window:
    """Which part of a prefix a call moves: `pages` pages from page `first`, of one shard."""

    first: int
    pages: int
    shard: int


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
    array = token_array(tokens)
    return Prefix(array, None, len(array) // space.page_tokens)


def checked_first(first: Any, prefix: Prefix) -> int:
    """`first`, a page of the prefix or its end; runs are passed from where they begin. Raises
    UsageError (code "bad_first")."""
    if isinstance(prefix.keys, Runs) and first != 0:
        raise UsageError(
            f"first = {first!r} together with KeyRuns; pass runs that begin at the page you mean",
            code="bad_first",
            context={"first": first},
        )
    return _index("first", first, prefix.pages, "the prefix has {} whole pages")


def checked_shard(shard: Any, space: Namespace) -> int:
    """Raises UsageError (code "bad_shard")."""
    return _index("shard", shard, space.shards - 1, "the namespace's last shard is {}")


def checked_timeout(timeout_s: Any, name: str = "timeout_s") -> float:
    """Seconds, 0 or more. Infinity is refused: every wait has an end. UsageError "bad_timeout"."""
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not 0 <= seconds <= MAX_TIMEOUT_S:
        raise UsageError(
            f"{name} = {timeout_s!r} is not a number of seconds from 0 to {MAX_TIMEOUT_S:.0f}",
            code="bad_timeout",
        )
    return seconds


MAX_TIMEOUT_S = 3600.0


def _index(name: str, value: Any, largest: int, why: str) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= largest:
        raise UsageError(
            f"{name} = {value!r} is not a number from 0 to {largest}: {why.format(largest)}",
            code=f"bad_{name}",
            context={name: value, "largest": largest},
        )
    return number

"""Waiting for a condition of another process, with a deadline that no healthy machine reaches; and
bounds for what has to run out of time.

Stateless; thread-safe.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

DEADLINE_S = 60.0
_STEP_S = 0.01

_T = TypeVar("_T")


def eventually(ask: Callable[[], _T | None], what: str, *, deadline_s: float = DEADLINE_S) -> _T:
    """The first answer of `ask` that is true; AssertionError naming `what`, and the last answer,
    when none was within deadline_s."""
    end = time.monotonic() + deadline_s
    never = threading.Event()
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what} (last seen: {answer!r})")
        never.wait(_STEP_S)


def longer_bounds(first_s: float = 0.5, *, most_s: float = DEADLINE_S) -> Iterator[float]:
    """Bounds to try in turn where one thing has to run out of time and another must not. How long
    the other takes depends on the machine, so no single bound is right everywhere: a short one
    fails where it is busy, a long one is waited for where it is not. What must hold under any bound
    is checked under each; leave the loop at the first that was long enough."""
    bound_s = first_s
    while bound_s < most_s:
        yield bound_s
        bound_s *= 2
    yield most_s


async def eventually_async(
    ask: Callable[[], Awaitable[_T | None]], what: str, *, deadline_s: float = DEADLINE_S
) -> _T:
    """As `eventually`, in an event loop, which goes on in between."""
    end = time.monotonic() + deadline_s
    while True:
        answer = await ask()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what} (last seen: {answer!r})")
        await asyncio.sleep(_STEP_S)

"""Waiting for a condition of another process, with a deadline that no healthy machine reaches.

Stateless; thread-safe.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

DEADLINE_S = 60.0
_STEP_S = 0.01

_T = TypeVar("_T")


def until(ask: Callable[[], _T | None], what: str, *, deadline_s: float = DEADLINE_S) -> _T:
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


async def until_awaited(
    ask: Callable[[], Awaitable[_T | None]], what: str, *, deadline_s: float = DEADLINE_S
) -> _T:
    """As `until`, in an event loop, which goes on in between."""
    end = time.monotonic() + deadline_s
    while True:
        answer = await ask()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what} (last seen: {answer!r})")
        await asyncio.sleep(_STEP_S)

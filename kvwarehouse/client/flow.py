"""What a call does, written once for the blocking client and for the one of asyncio.

A flow is a generator that yields the result of each thing it asks of a path or a channel. There a
blocking client has the answer itself, and `finish` hands it back; one of asyncio has a coroutine,
and kvwarehouse/aio/flow.py awaits it. So a flow writes `found = yield path.lookup(...)`.

A flow belongs to one call.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

_T = TypeVar("_T")

Flow: TypeAlias = Generator[Any, Any, _T]


def finish(flow: Flow[_T]) -> _T:
    """Runs a flow whose answers are there when they are yielded."""
    try:
        answer = next(flow)
        while True:
            answer = flow.send(answer)
    except StopIteration as end:
        result: _T = end.value
        return result

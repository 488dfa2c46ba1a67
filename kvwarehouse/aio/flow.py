"""Runs the flows of kvwarehouse/client/flow.py whose answers are awaited."""

from __future__ import annotations

from typing import TypeVar

from kvwarehouse.client.flow import Flow

_T = TypeVar("_T")


async def finish(flow: Flow[_T]) -> _T:
    """What fails, or is cancelled, is raised in the flow, where it asked."""
    try:
        asked = next(flow)
        while True:
            try:
                answer = await asked
            except BaseException as error:  # noqa: BLE001  the flow decides
                asked = flow.throw(error)
            else:
                asked = flow.send(answer)
    except StopIteration as end:
        result: _T = end.value
        return result

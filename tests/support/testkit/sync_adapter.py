"""A client of asyncio behind the calls of the blocking one, so that one suite judges both.

One thread: every call runs the loop until it is answered, and the loop stands still in between.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Self

from kvwarehouse import aio

_END = object()


class SyncAdapter:
    """Whatever the client of asyncio has, awaited. Ends its loop as a context manager."""

    def __init__(self, connecting: Callable[[], Awaitable[aio.Client]]) -> None:
        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(_awaited(connecting))
        except BaseException:
            self._runner.close()
            raise

    def __getattr__(self, name: str) -> Any:
        return _blocking(self._runner, getattr(self._client, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._runner.close()


class _SyncNamespace:
    def __init__(self, runner: asyncio.Runner, opened: aio.OpenNamespace) -> None:
        self._runner = runner
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return _blocking(self._runner, getattr(self._opened, name))


def _blocking(runner: asyncio.Runner, attribute: Any) -> Any:
    if not inspect.isroutine(attribute):
        return attribute

    def call(*arguments: Any, **named: Any) -> Any:
        answer = runner.run(_awaited(lambda: attribute(*arguments, **named)))
        if isinstance(answer, aio.OpenNamespace):
            return _SyncNamespace(runner, answer)
        return _iterated(runner, answer) if hasattr(answer, "__aiter__") else answer

    return call


def _iterated(runner: asyncio.Runner, answers: Any) -> Iterator[Any]:
    try:
        while (answer := runner.run(_awaited(lambda: anext(answers, _END)))) is not _END:
            yield answer
    finally:
        runner.run(answers.aclose())


async def _awaited(begin: Callable[[], Any]) -> Any:
    """`begin` runs in the loop too."""
    begun = begin()
    return await begun if inspect.isawaitable(begun) else begun

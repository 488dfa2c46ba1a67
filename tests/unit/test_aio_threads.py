"""The wait for a thread counts: a call has what is left of its time, and no more."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from kvwarehouse import Namespace, UsageError
from kvwarehouse.aio.shared_memory import AsyncSharedMemory
from kvwarehouse.aio.threads import THREADS, Threads
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.requests import LoadRequest
from kvwarehouse.types import Loaded

SPACE = Namespace("m", "w", "f", "t/1", page_tokens=4, page_bytes=16)
TIME_S = 60.0


class Memory:
    """Writes down the time that a load is given."""

    timeout_s = TIME_S
    patient = True

    def __init__(self) -> None:
        self.given_s: list[float] = []

    def load(self, request: LoadRequest) -> Loaded:
        self.given_s.append(request.timeout_s)
        return Loaded(0)

    def close(self) -> None:
        """Nothing is held."""


def test_closing_ends_what_waits_for_a_thread_and_is_bounded() -> None:
    """What still works is left to end by itself."""

    async def run() -> list[Any]:
        threads, free = Threads(), threading.Event()
        busy = [
            asyncio.create_task(threads.run(free.wait, TIME_S, late=bool)) for _ in range(THREADS)
        ]
        waiting = [asyncio.create_task(threads.run(list, TIME_S, late=list)) for _ in range(3)]
        await asyncio.sleep(0)
        await threads.close(free.wait, 0.1)  # as a session's end that waits for its calls
        assert not free.is_set()
        waited = await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(UsageError) as refused:
            await threads.run(list, TIME_S, late=list)
        free.set()
        assert await asyncio.gather(*busy) == [True] * THREADS
        return [*waited, refused.value]

    assert [getattr(each, "code", each) for each in asyncio.run(run())] == ["closed"] * 4


def test_load_that_waited_for_a_thread_has_what_is_left_of_its_time() -> None:
    beneath = Memory()

    async def run() -> None:
        threads = Threads()
        memory = AsyncSharedMemory(beneath, None, threads)  # type: ignore[arg-type]
        free = threading.Event()
        busy = [
            asyncio.create_task(threads.run(free.wait, TIME_S, late=bool)) for _ in range(THREADS)
        ]
        await asyncio.sleep(0)
        out = Regions.rows(np.zeros((1, 16), np.uint8), writable=True)
        request = LoadRequest.checked(SPACE, range(4), None, out, 0, 0, TIME_S)
        load = asyncio.create_task(memory.load(request))
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*busy, load)
        await memory.close(TIME_S)

    asyncio.run(run())
    assert len(beneath.given_s) == 1
    assert 0 < beneath.given_s[0] < TIME_S

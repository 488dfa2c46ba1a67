"""The wait for a thread counts: a call has what is left of its time, and no more."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from kvwarehouse import Namespace
from kvwarehouse.aio.local import LocalPath
from kvwarehouse.aio.threads import THREADS, Threads
from kvwarehouse.client.prefix import Window, prefix_of
from kvwarehouse.client.regions import Regions

SPACE = Namespace("m", "w", "f", "t/1", page_tokens=4, page_bytes=16)
TIME_S = 60.0


class Path:
    """Writes down the time that a load is given."""

    timeout_s = TIME_S
    patient = True

    def __init__(self) -> None:
        self.given_s: list[float] = []

    def load(self, *arguments: Any) -> tuple[int, dict[str, int]]:
        self.given_s.append(arguments[-1])
        return 0, {}

    def close(self) -> None:
        """Nothing is held."""


def test_load_that_waited_for_a_thread_has_what_is_left_of_its_time() -> None:
    beneath = Path()

    async def run() -> None:
        threads = Threads()
        path = LocalPath(beneath, None, threads)  # type: ignore[arg-type]
        free = threading.Event()
        busy = [
            asyncio.create_task(threads.run(free.wait, TIME_S, late=bool)) for _ in range(THREADS)
        ]
        await asyncio.sleep(0)
        out = Regions.rows(np.zeros((1, 16), np.uint8), writable=True)
        load = asyncio.create_task(
            path.load(SPACE, prefix_of(SPACE, range(4), None), Window(0, 1, 0), out, TIME_S)
        )
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*busy, load)
        await path.close()

    asyncio.run(run())
    assert len(beneath.given_s) == 1
    assert 0 < beneath.given_s[0] < TIME_S

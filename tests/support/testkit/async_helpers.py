"""What tests of the client for asyncio share: prompts whose bytes follow from their number, a
daemon that stands still, and what must hold when all calls have ended.

For one event loop at a time.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse.aio.connect import connect_grpc
from kvwarehouse_bench.harness.eventually import eventually_async
from kvwarehouse_bench.harness.serving import Serving

WAIT_S = 60.0
PAGE_TOKENS = 4
PAGE_BYTES = 65536
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="f", layout="t/1", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES
)


def prompt(number: int, pages: int = 4) -> Any:
    return np.arange(pages * PAGE_TOKENS, dtype=np.uint32) + 100_000 * number


def pages_of(number: int, pages: int = 4) -> Any:
    """Bytes that follow from the prompt."""
    noise = np.random.default_rng(number)
    return noise.integers(0, 256, (pages, PAGE_BYTES), dtype=np.uint8)


def empty(pages: int = 4) -> Any:
    return np.zeros((pages, PAGE_BYTES), np.uint8)


async def connected(serving: Serving, path: str = "local", **options: Any) -> kvw.aio.Client:
    connect = kvw.aio.connect if path == "local" else connect_grpc
    return await connect(serving.address, **options)


@contextmanager
def stopped(serving: Serving) -> Iterator[Callable[[], None]]:
    """A daemon that answers nobody, until the block ends or what it gives is called."""
    serving.pause()
    os.waitid(os.P_PID, serving.pid, os.WSTOPPED)  # the signal alone does not mean it has stopped
    try:
        yield serving.resume
    finally:
        os.kill(serving.pid, signal.SIGCONT)


async def turns(count: int = 50) -> None:
    """Lets everything run that can run in the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def only_on_nvme(client: kvw.aio.Client, ns: kvw.aio.OpenNamespace, number: int) -> None:
    """Stores a prompt so that a load of it needs the daemon."""
    await ns.store(prompt(number), pages_of(number))
    assert (await client.flush(WAIT_S)).pending == 0
    await client.evict(SPACE, 100_000)
    assert (await ns.lookup(prompt(number))).by_tier == {
        "hbm": 0,
        "dram": 0,
        "nvme": 4,
        "remote": 0,
    }


async def settled(client: kvw.aio.Client) -> None:
    """Nothing is pinned and no slot is reserved any more."""

    async def ask() -> bool:
        core = (await client.status())["core"]
        assert core["pins"]["held"] == 0
        dram = core["tiers"]["dram"]
        return bool(dram["reserved_slots"] == dram["limbo_slots"] == 0)

    await eventually_async(ask, "every reserved slot is settled")


async def check_right_or_missing(ns: kvw.aio.OpenNamespace, number: int) -> int:
    out = empty()
    filled = await ns.load(prompt(number), out, timeout_s=WAIT_S)
    assert np.array_equal(out[:filled], pages_of(number)[:filled])
    return filled

"""Many calls at once, and a loop that goes on while they wait and copy."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.aio.threads import THREADS
from kvwarehouse.client.routing import Question
from kvwarehouse_bench.harness.eventually import longer_bounds
from kvwarehouse_bench.harness.serving import Serving
from testkit.async_helpers import (
    SPACE,
    WAIT_S,
    check_right_or_missing,
    connected,
    empty,
    only_on_nvme,
    pages_of,
    prompt,
    settled,
    stopped,
    turns,
)

SEVERAL = THREADS + 3


@pytest.mark.concurrency
def test_many_calls_at_once_each_load_what_they_stored(serving: Serving, path: str) -> None:
    async def one(ns: kvw.aio.OpenNamespace, number: int) -> None:
        assert (await ns.store(prompt(number), pages_of(number), timeout_s=WAIT_S)).stored == 4
        assert (await ns.lookup(prompt(number))).pages == 4
        assert await check_right_or_missing(ns, number) == 4

    async def run() -> None:
        async with await connected(serving, path) as client:
            ns = await client.open(SPACE)
            width = 100 if path == "local" else 20  # the daemon bounds its streams
            for begin in range(0, 100, width):
                await asyncio.gather(*(one(ns, n) for n in range(begin, begin + width)))
            names = [thread.name for thread in threading.enumerate()]
            mine = [name for name in names if name.startswith("kvwarehouse-aio")]
            assert len(mine) <= THREADS + 1
            await settled(client)

    asyncio.run(run())


def test_calls_that_find_no_thread_in_their_time_end_with_it(serving: Serving) -> None:
    async def run() -> None:
        async with await connected(serving) as client:
            ns = await client.open(SPACE)
            await ns.store(prompt(99), pages_of(99))
            with stopped(serving) as resume:
                stores = [
                    asyncio.create_task(
                        ns.store(prompt(number), pages_of(number), timeout_s=WAIT_S)
                    )
                    for number in range(SEVERAL)
                ]
                await turns()
                filled = await ns.load(prompt(99), empty(), timeout_s=0.05)
                assert (filled, filled.missed) == (0, {"timeout": 4})
                assert (await ns.pin(prompt(99), timeout_s=0.05)).pages == 0
                assert not await client.refresh(timeout_s=0.05)
                with pytest.raises(kvw.TransportError) as late:
                    await ns.store(prompt(50), pages_of(50), timeout_s=0.05)
                assert late.value.code == "deadline"
                # Neither of them needs a thread.
                assert (await ns.lookup(prompt(99))).pages == 4
                with await ns.pin(prompt(99)) as pins:
                    assert pins.pages == 4
                resume()
                assert [each.stored for each in await asyncio.gather(*stores)] == [4] * SEVERAL
            assert (await ns.lookup(prompt(50))).pages == 0

    asyncio.run(run())


def test_loop_goes_on_while_loads_and_stores_wait(serving: Serving, path: str) -> None:
    """Only the loop lets the daemon go on: one that was held up would never get there, and the
    calls would end with their time."""

    async def run() -> None:
        async with await connected(serving, path) as client:
            ns = await client.open(SPACE)
            await only_on_nvme(client, ns, 1)
            seen = []
            with stopped(serving) as resume:
                out = empty()
                load = asyncio.create_task(ns.load(prompt(1), out, timeout_s=WAIT_S))
                store = asyncio.create_task(ns.store(prompt(2), pages_of(2), timeout_s=WAIT_S))
                for task in (load, store):
                    task.add_done_callback(lambda task: seen.append("done"))
                await turns()
                seen.append("loop")
                resume()
                assert await load == 4
                assert (await store).stored == 4
            await turns()  # a task's callbacks come after it
            assert seen == ["loop", "done", "done"]
            assert np.array_equal(out, pages_of(1))

    asyncio.run(run())


def test_loop_goes_on_while_many_bytes_are_copied(serving: Serving, path: str) -> None:
    """A task that wants a turn of the loop for each step takes many during one load."""

    async def run() -> None:
        async with await connected(serving, path) as client:
            ns = await client.open(SPACE)
            tokens, pages, out = prompt(1, 600), pages_of(1, 600), empty(600)
            assert (await ns.store(tokens, pages, timeout_s=WAIT_S)).stored == 600
            ended = asyncio.Event()
            steps = 0

            async def step() -> None:
                nonlocal steps
                while not ended.is_set():
                    await asyncio.sleep(0)
                    steps += 1

            stepping = asyncio.create_task(step())
            assert await ns.load(tokens, out, timeout_s=WAIT_S) == 600
            ended.set()
            await stepping
            assert steps >= 10
            assert np.array_equal(out, pages)

    asyncio.run(run())


def test_warehouses_are_asked_at_once_and_one_that_hangs_is_left_out(
    serving: Serving, tmp_path: Path
) -> None:
    async def run() -> None:
        async with await connected(serving) as client:
            ns = await client.open(SPACE)
            await ns.store(prompt(1), pages_of(1))
        with Serving(tmp_path / "other", dram="16MiB") as other:
            addresses = [other.address, serving.address]
            both = await kvw.aio.who_has(addresses, Question(tokens=prompt(1)), timeout_s=WAIT_S)
            with stopped(other):
                for bound_s in longer_bounds():
                    one = await kvw.aio.who_has(
                        addresses, Question(tokens=prompt(1)), timeout_s=bound_s
                    )
                    assert one[0].problem
                    if not one[1].problem:
                        break
        assert [each.problem for each in both] == ["", ""]
        assert both[0].holding is None
        assert one[0].problem
        for found in (both[1], one[1]):
            assert found.holding is not None
            assert (found.address, found.holding.pages) == (serving.address, 4)

    asyncio.run(run())

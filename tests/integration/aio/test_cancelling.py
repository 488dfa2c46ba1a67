"""Tasks that are cancelled: their buffers are the caller's again, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.aio.threads import THREADS
from kvwarehouse_bench.harness.eventually import eventually_async
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


def test_cancelled_local_load_ends_after_the_last_byte_it_writes(serving: Serving) -> None:
    async def run() -> None:
        async with await connected(serving) as client:
            ns = await client.open(SPACE)
            await only_on_nvme(client, ns, 1)
            out = empty()
            with stopped(serving) as resume:
                load = asyncio.create_task(ns.load(prompt(1), out, timeout_s=WAIT_S))
                await turns()
                for _ in range(3):  # as often as anyone likes
                    load.cancel()
                    await turns()
                assert not load.done()
                resume()
                with pytest.raises(asyncio.CancelledError):
                    await load
            assert np.array_equal(out, pages_of(1))  # it went on to its end, and then it ended
            await settled(client)

    asyncio.run(run())


def test_cancelled_pin_holds_nothing(serving: Serving) -> None:
    async def run() -> None:
        async with await connected(serving) as client:
            ns = await client.open(SPACE)
            await only_on_nvme(client, ns, 1)
            with stopped(serving) as resume:
                pin = asyncio.create_task(ns.pin(prompt(1), timeout_s=WAIT_S))
                await turns()
                pin.cancel()
                await turns()
                assert not pin.done()
                resume()
                with pytest.raises(asyncio.CancelledError) as cancelled:
                    await pin
            # Kept alive: what the task returned is not what lets the pins go.
            assert cancelled is not None
            assert (await ns.lookup(prompt(1))).by_tier["dram"] == 4
            await settled(client)
            assert await client.evict(SPACE, 100) == 4

    asyncio.run(run())


def test_call_that_is_cancelled_before_a_thread_takes_it_never_begins(serving: Serving) -> None:
    async def run() -> None:
        async with await connected(serving) as client:
            ns = await client.open(SPACE)
            with stopped(serving) as resume:
                stores = [
                    asyncio.create_task(ns.store(prompt(n), pages_of(n), timeout_s=WAIT_S))
                    for n in range(SEVERAL)
                ]
                await turns()
                for store in stores[THREADS:]:
                    store.cancel()
                await turns()
                assert [store.done() for store in stores] == [False] * THREADS + [True] * 3
                resume()
                await asyncio.gather(*stores[:THREADS])
            found = [(await ns.lookup(prompt(n))).pages for n in range(SEVERAL)]
            assert found == [4] * THREADS + [0] * 3

    asyncio.run(run())


@pytest.mark.concurrency
def test_tasks_cancelled_at_any_point_leave_nothing_behind_and_no_wrong_byte(
    serving: Serving, path: str, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = 12

    async def step(client: kvw.aio.Client, ns: kvw.aio.OpenNamespace, number: int) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            await ns.store(prompt(number), pages_of(number), timeout_s=WAIT_S)
        elif kind == 1:
            await check_right_or_missing(ns, number)
        elif kind == 2 and client.local:
            with await ns.pin(prompt(number), timeout_s=WAIT_S):
                await asyncio.sleep(0)
        else:
            await client.evict(SPACE, 4)

    async def cancelled(task: asyncio.Task[None], after: int) -> None:
        await turns(after)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def run() -> None:
        async with await connected(serving, path) as client:
            ns = await client.open(SPACE)
            for _ in range(25):
                tasks = [
                    asyncio.create_task(step(client, ns, rng.randrange(prompts))) for _ in range(6)
                ]
                await asyncio.gather(
                    *(cancelled(each, rng.choice((0, 1, 3, 9, 40, 200, 2000))) for each in tasks)
                )
            await settled(client)

            async def streams_ended() -> bool:
                return (await client.status())["service"]["streams"] == 0

            await eventually_async(streams_ended, "the daemon has no stream left")
            for number in range(prompts):
                await ns.store(prompt(number), pages_of(number), timeout_s=WAIT_S)
                assert await check_right_or_missing(ns, number) == 4
            await settled(client)

    asyncio.run(run())


def test_cancelling_a_remote_call_ends_it_at_once_and_leaves_the_pages_alone(
    serving: Serving,
) -> None:
    async def run() -> None:
        async with await connected(serving, "remote") as client:
            ns = await client.open(SPACE)
            await only_on_nvme(client, ns, 1)
            out, pages = empty(), pages_of(2)
            with stopped(serving):
                calls = [
                    asyncio.create_task(ns.load(prompt(1), out, timeout_s=WAIT_S)),
                    asyncio.create_task(ns.store(prompt(2), pages, timeout_s=WAIT_S)),
                    asyncio.create_task(client.status()),
                ]
                await turns()
                for call in calls:
                    call.cancel()
                # The daemon stands still: only the client can have ended them.
                ended = await asyncio.gather(*calls, return_exceptions=True)
                assert [type(each) for each in ended] == [asyncio.CancelledError] * 3
            assert await check_right_or_missing(ns, 1) == 4
            assert not out.any()

    asyncio.run(run())

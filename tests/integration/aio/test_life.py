"""Watches, daemons that end, closing, other loops and forks."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.daemon.interceptors import WATCHES
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


def test_watch_is_an_async_iterator_that_cancelling_ends(serving: Serving, path: str) -> None:
    async def run() -> None:
        async with await connected(serving, path) as client:
            ns = await client.open(SPACE)
            keys: list[bytes] = []
            synced = asyncio.Event()

            async def watch() -> None:
                async for message in client.watch(SPACE):
                    keys.extend(change.key for change in message.changes if change.stored)
                    if message.synced:
                        synced.set()

            watching = asyncio.create_task(watch())
            await asyncio.wait_for(synced.wait(), WAIT_S)
            await ns.store(prompt(1), pages_of(1))

            async def seen() -> bool:
                return len(set(keys)) == 4

            await eventually_async(seen, "the watch says what was stored")
            assert set(keys) == {page.key async for page in client.pages(SPACE)}
            watching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watching

    asyncio.run(run())


def test_watches_that_are_cancelled_or_closed_make_room_for_others(serving: Serving) -> None:
    async def run() -> None:
        async with await connected(serving) as client:
            for _ in range(2):
                watches: list[Any] = []

                async def begun() -> Any:
                    watch = client.watch()
                    with suppress(kvw.CapacityError):
                        assert (await anext(watch)).synced
                        return watch
                    return None

                while len(watches) < WATCHES:
                    watches.append(await eventually_async(begun, "there is room"))
                with pytest.raises(kvw.CapacityError) as refused:
                    await anext(client.watch())
                assert refused.value.code == "too_many_watchers"
                half = WATCHES // 2
                waiting = [asyncio.ensure_future(anext(watch)) for watch in watches[:half]]
                await turns()
                for each in waiting:
                    each.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                for watch in watches[half:]:
                    await watch.aclose()

    asyncio.run(run())


def test_daemon_killed_in_the_middle_fails_calls_and_hangs_none(
    serving: Serving, path: str, seed: int
) -> None:
    rng = random.Random(seed)

    async def traffic(ns: kvw.aio.OpenNamespace, number: int, ends: asyncio.Event) -> int:
        failed = 0
        while not ends.is_set():
            try:
                await ns.store(prompt(number), pages_of(number))
                await check_right_or_missing(ns, number)
            except kvw.TransportError:
                failed += 1
            await asyncio.sleep(0)
        return failed

    async def run() -> None:
        async with await connected(serving, path) as client:
            ns = await client.open(SPACE)
            watch = client.watch()
            assert (await anext(watch)) is not None
            ends = asyncio.Event()
            tasks = [asyncio.create_task(traffic(ns, number, ends)) for number in range(6)]
            await turns(rng.randrange(2000))
            serving.kill()
            with pytest.raises(kvw.TransportError):
                async for _ in watch:
                    pass
            with pytest.raises(kvw.TransportError):
                await client.status()
            await asyncio.to_thread(serving.start)
            ends.set()
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*tasks)
                assert await ns.store(prompt(50), pages_of(50))
                assert await check_right_or_missing(ns, 50) == 4
            await settled(client)

    asyncio.run(run())


def test_closing_ends_what_is_under_way_on_a_connection_before(serving: Serving) -> None:
    async def run() -> None:
        client = await connected(serving, "remote", timeout_s=WAIT_S)
        watch = client.watch()
        await anext(watch)
        client._channel._forget(client._channel._channel)  # as a call that heard no answer on it
        await client.status()
        await client.close()
        with pytest.raises(kvw.TransportError) as ended:
            async for _ in watch:
                pass
        assert ended.value.code == "cancelled"

    asyncio.run(run())


def test_namespace_is_registered_again_at_a_daemon_that_lost_everything(
    serving: Serving, path: str
) -> None:
    async def run() -> None:
        async with await connected(serving, path) as client:
            ns = await client.open(SPACE)
            await ns.store(prompt(1), pages_of(1))
            serving.stop()
            serving.lose_arena()
            shutil.rmtree(serving.nvme_dir)
            serving.start()
            assert (await ns.store(prompt(2), pages_of(2), timeout_s=WAIT_S)).stored == 4
            assert await check_right_or_missing(ns, 2) == 4
            assert (await ns.lookup(prompt(1))).pages == 0

    asyncio.run(run())


def test_closing_waits_for_calls_under_way_and_ends_watches(serving: Serving, path: str) -> None:
    async def run() -> None:
        client = await connected(serving, path, timeout_s=WAIT_S)
        ns = await client.open(SPACE)
        watch = client.watch()
        await anext(watch)
        await only_on_nvme(client, ns, 2)
        out = empty()
        with stopped(serving) as resume:
            load = asyncio.create_task(ns.load(prompt(2), out, timeout_s=WAIT_S))
            store = asyncio.create_task(ns.store(prompt(1), pages_of(1), timeout_s=WAIT_S))
            await turns()
            closing = asyncio.create_task(client.close())
            await turns()
            assert not closing.done()
            with pytest.raises(kvw.UsageError) as refused:
                await ns.lookup(prompt(1))
            assert refused.value.code == "closed"
            resume()
            await closing
            assert store.done()
            assert (await store).stored == 4
            assert load.done()
            assert await load == 4
            assert np.array_equal(out, pages_of(2))
        with pytest.raises(kvw.TransportError) as ended:
            async for _ in watch:
                pass
        assert ended.value.code == "cancelled"
        await client.close()

    asyncio.run(run())


def test_closing_is_bounded_and_what_it_did_not_wait_for_fails(serving: Serving, path: str) -> None:
    async def run() -> None:
        client = await connected(serving, path, timeout_s=WAIT_S)
        ns = await client.open(SPACE)
        client._channel.endpoint.timeout_s = 0.5  # connecting may take longer on a busy machine
        with stopped(serving):
            store = asyncio.create_task(ns.store(prompt(1), pages_of(1), timeout_s=WAIT_S))
            await turns()
            await asyncio.wait_for(client.close(), WAIT_S)
            if path == "remote":
                with pytest.raises(kvw.TransportError) as cut:
                    await store
                assert cut.value.code == "cancelled"
            else:
                assert not store.done()
        if path == "local":
            await asyncio.gather(store, return_exceptions=True)

    asyncio.run(run())


def test_client_in_another_loop_is_refused_by_name(serving: Serving, path: str) -> None:
    async def use(client: kvw.aio.Client, ns: kvw.aio.OpenNamespace) -> None:
        for call in (client.status, lambda: ns.lookup(prompt(1)), client.close):
            with pytest.raises(kvw.UsageError, match="event loop") as refused:
                await call()
            assert refused.value.code == "wrong_loop"
        with pytest.raises(kvw.UsageError, match="event loop"):
            client.watch()
        with pytest.raises(kvw.UsageError, match="event loop"):
            await anext(client.pages(SPACE))
        with pytest.raises(kvw.UsageError, match="event loop"):
            await anext(client.check())

    async def run() -> None:
        async with await connected(serving, path) as client:
            ns = await client.open(SPACE)
            await asyncio.to_thread(lambda: asyncio.run(use(client, ns)))
            assert (await ns.lookup(prompt(1))).pages == 0

    asyncio.run(run())


FORKING = """
import asyncio, os, sys
import numpy as np
import kvwarehouse as kvw
space = kvw.Namespace("m", "w", "uint8", "t/1", page_tokens=4, page_bytes=65536)

async def child(client, ns, pages):
    refused = 0
    for call in (lambda: ns.lookup(range(40)), lambda: ns.load(range(40), pages), client.status):
        try:
            await call()
        except kvw.TransportError as error:
            refused += error.code == "forked"
    await client.close()
    return refused

async def run():
    async with await kvw.aio.connect(sys.argv[1]) as client:
        ns = await client.open(space)
        pages = np.full((10, 65536), 7, np.uint8)
        assert (await ns.store(range(40), pages)).stored == 10
        pins = await ns.pin(range(40))
        pid = os.fork()
        if pid == 0:
            refused = 0
            step = child(client, ns, pages)
            try:
                step.send(None)
            except StopIteration as end:
                refused = end.value
            os._exit(refused)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 3, f"the child's client refused {status} of 3 calls"
        await client.evict(space, 10)
        assert (await ns.lookup(range(40))).pages == 10, "the child took the parent's pins with it"
        pages[:] = 0
        assert await ns.load(range(40), pages) == 10 and (pages == 7).all()
        assert (await ns.store(range(100, 140), pages)).stored == 10

asyncio.run(run())
"""


def test_forked_child_is_refused_and_its_parent_goes_on(serving: Serving) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKING, serving.address],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""The client for asyncio where it differs from its twin: many calls at once, tasks that are
cancelled, a loop that goes on, and the one loop that it belongs to."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.aio.connect import connect_grpc
from kvwarehouse.aio.threads import THREADS
from kvwarehouse.client.routing import Question
from kvwarehouse.daemon.edge import WATCHES
from kvwarehouse.testing.serving import Serving
from kvwarehouse.testing.until import until_awaited

WAIT_S = 60.0
PAGE_TOKENS = 4
PAGE_BYTES = 65536
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="f", layout="t/1", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES
)
SEVERAL = THREADS + 3


def prompt(number: int, pages: int = 4) -> Any:
    return np.arange(pages * PAGE_TOKENS, dtype=np.uint32) + 100_000 * number


def pages_of(number: int, pages: int = 4) -> Any:
    """Bytes that follow from the prompt."""
    noise = np.random.default_rng(number)
    return noise.integers(0, 256, (pages, PAGE_BYTES), dtype=np.uint8)


def empty(pages: int = 4) -> Any:
    return np.zeros((pages, PAGE_BYTES), np.uint8)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="64MiB", nvme_capacity="256MiB", streams="40") as serving:
        yield serving


@pytest.fixture(params=["local", "remote"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    assert (await ns.lookup(prompt(number))).by_tier == {"dram": 0, "nvme": 4}


async def settled(client: kvw.aio.Client) -> None:
    """Nothing is pinned and no slot is reserved any more."""

    async def ask() -> bool:
        core = (await client.status())["core"]
        assert core["pins"]["held"] == 0
        dram = core["tiers"]["dram"]
        return bool(dram["reserved_slots"] == dram["limbo_slots"] == 0)

    await until_awaited(ask, "every reserved slot is settled")


async def check_right_or_missing(ns: kvw.aio.OpenNamespace, number: int) -> int:
    out = empty()
    filled = await ns.load(prompt(number), out, timeout_s=WAIT_S)
    assert np.array_equal(out[:filled], pages_of(number)[:filled])
    return filled


# --- many at once


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


# --- the loop goes on


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


# --- cancelled


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

            await until_awaited(streams_ended, "the daemon has no stream left")
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


# --- watch


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

            await until_awaited(seen, "the watch says what was stored")
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
                    watches.append(await until_awaited(begun, "there is room"))
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


# --- a daemon that ends


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


# --- closing, other loops, forks


def test_closing_waits_for_calls_under_way_and_ends_watches(serving: Serving, path: str) -> None:
    async def run() -> None:
        client = await connected(serving, path, timeout_s=WAIT_S)
        ns = await client.open(SPACE)
        watch = client.watch()
        await anext(watch)
        with stopped(serving) as resume:
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
        with pytest.raises(kvw.TransportError) as ended:
            async for _ in watch:
                pass
        assert ended.value.code == "cancelled"
        await client.close()

    asyncio.run(run())


def test_closing_is_bounded_and_what_it_did_not_wait_for_fails(serving: Serving, path: str) -> None:
    async def run() -> None:
        client = await connected(serving, path, timeout_s=2)
        ns = await client.open(SPACE)
        with stopped(serving):
            store = asyncio.create_task(ns.store(prompt(1), pages_of(1), timeout_s=8))
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


# --- several warehouses


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
                one = await kvw.aio.who_has(addresses, Question(tokens=prompt(1)), timeout_s=2)
        assert [each.problem for each in both] == ["", ""]
        assert both[0].holding is None
        assert one[0].problem
        for found in (both[1], one[1]):
            assert found.holding is not None
            assert (found.address, found.holding.pages) == (serving.address, 4)

    asyncio.run(run())

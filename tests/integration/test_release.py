"""What clients say they need no more: it leaves before the rest, whichever way it was said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import aio
from kvwarehouse.aio.connect import connect_grpc as aio_connect_grpc
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving

PAGE_BYTES = 16384
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=PAGE_BYTES
)
PAGES = 8
ROWS = np.zeros((PAGES, PAGE_BYTES), np.uint8)
ROOM = 12 << 20
"""Of DRAM: 96 prompts and no more."""
PROMPTS = ROOM // (PAGES * PAGE_BYTES)


def tokens(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + PAGES * SPACE.page_tokens))


def store(space: kvw.OpenNamespace, number: int) -> None:
    assert space.store(tokens(number), ROWS, timeout_s=60).stored == PAGES


def hears(client: kvw.Client, pages: int) -> None:
    """The daemon looks every now and then."""
    eventually(
        lambda: client.status()["core"]["released_pages"] >= pages, f"{pages} pages are released"
    )


def local(serving: Serving, number: int) -> int:
    with serving.connect() as client:
        return client.open(SPACE).release(tokens(number))


def remote(serving: Serving, number: int) -> int:
    with connect_grpc(f"unix://{serving.socket}") as client:
        return client.open(SPACE).release(tokens(number))


def in_a_loop(serving: Serving, number: int) -> int:
    async def release() -> int:
        async with await aio.connect(f"unix://{serving.socket}") as client:
            return await (await client.open(SPACE)).release(tokens(number))

    return asyncio.run(release())


def in_a_loop_over_grpc(serving: Serving, number: int) -> int:
    async def release() -> int:
        async with await aio_connect_grpc(f"unix://{serving.socket}") as client:
            return await (await client.open(SPACE)).release(tokens(number))

    return asyncio.run(release())


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize("way", [local, remote, in_a_loop, in_a_loop_over_grpc])
def test_what_was_released_leaves_before_what_is_older(tmp_path: Path, policy: str, way) -> None:
    with Serving(tmp_path, dram="12MiB", policy=policy) as serving, serving.connect() as client:
        space = client.open(SPACE)
        for number in range(PROMPTS // 2):
            store(space, number)
        over = range(PROMPTS // 2 - 5, PROMPTS // 2)  # the newest
        assert [way(serving, number) for number in over] == [PAGES] * len(over)
        hears(client, PAGES * len(over))
        assert space.lookup(tokens(over[0])).pages == PAGES  # while there is room
        for number in range(1000, 1000 + PROMPTS):
            # Looked at first: the daemon may take the last that were released and older ones at a
            # time, between the two looks too.
            oldest = space.lookup(tokens(0)).pages
            if not any(space.lookup(tokens(each)).pages for each in over):
                break
            assert oldest == PAGES
            store(space, number)
        else:
            raise AssertionError("what was released did not leave")


def test_what_prompts_share_stays_with_the_others(tmp_path: Path) -> None:
    with Serving(tmp_path, dram="12MiB") as serving, serving.connect() as client:
        space = client.open(SPACE)
        head = tokens(1)[: 4 * SPACE.page_tokens]
        first = head + tokens(2)[: 4 * SPACE.page_tokens]
        second = head + tokens(3)[: 4 * SPACE.page_tokens]
        for prompt in (first, second):
            space.store(prompt, ROWS, timeout_s=60)
        assert space.release(first) == PAGES
        hears(client, 4)
        assert space.release(second, first=6) == 2
        hears(client, 6)
        assert client.status()["core"]["released_pages"] == 6


def test_release_of_what_is_not_stored_speaks_of_nothing(tmp_path: Path) -> None:
    with Serving(tmp_path, dram="12MiB") as serving, serving.connect() as client:
        space = client.open(SPACE)
        assert space.release(tokens(1)) == 0
        assert space.release([1]) == 0  # no whole page
        assert space.release(tokens(1), first=PAGES) == 0
        with pytest.raises(kvw.UsageError) as refused:
            space.release(tokens(1), first=PAGES + 1)
        assert refused.value.code == "bad_first"
        with connect_grpc(f"unix://{serving.socket}") as other:
            assert other.open(SPACE).release(tokens(1)) == 0
            with pytest.raises(kvw.UsageError):
                other.open(SPACE).release(tokens(1), first=PAGES + 1)

"""Bits flipped in the metadata of slots that are being written or filled, while clients store, load
from NVMe and lose their daemon: every load is right or a miss, the daemon goes on, and each slot is
free again once nobody writes.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.strain.raw_protocols import FILLING, RESERVED, SlotsFile
from testkit import tally

LONG = tally.rounds(1) > 1  # `make faults`
pytestmark = pytest.mark.timeout(900 if LONG else 240)

CLASS = "metadata of unfinished slots flipped while clients store"
SIZES = {
    "dram": "16MiB",
    "nvme_capacity": "32MiB",
    "nvme_segment": "2MiB",
    "grace_s": "0.1",
    "limbo_after_s": "0.5",
}
PAGE_BYTES = 120_000
ALONE, RANKS = (
    kvw.Namespace(
        model=f"{shards}", weights="w", dtype="uint8", layout="t/1", page_tokens=1,
        page_bytes=PAGE_BYTES // shards, shards=shards,
    )
    for shards in (1, 2)
)  # fmt: skip
PROMPT = 8
PROMPTS = 24  # three times what the arena holds
FLIPS = 20  # of one trial


class Rank:
    """Stores and loads prompts of both namespaces until it is told to stop."""

    def __init__(self, serving: Serving, seed: int, stop: threading.Event) -> None:
        self.serving, self.rng, self.stop = serving, random.Random(seed), stop
        self.loaded = 0

    def run(self) -> None:
        with self.serving.connect(timeout_s=60) as client:
            while not self.stop.is_set():
                # Of a daemon that is killed; the next call finds the next one.
                with contextlib.suppress(kvw.TransportError):
                    self.step(client)

    def step(self, client: kvw.Client) -> None:
        space = self.rng.choice((ALONE, RANKS))
        nodes = nodes_of(self.rng.randrange(PROMPTS))
        shard = self.rng.randrange(space.shards)
        if self.rng.random() < 0.5:
            data = pages_of(nodes, shard, 0, space.page_bytes)
            result = client.open(space).store(nodes, data, shard, timeout_s=5)
            assert result.stored + result.already + result.dropped_pages == PROMPT
        else:
            self.loaded += load(client, space, nodes, shard)


def nodes_of(prompt: int) -> list[int]:
    return [prompt << 8 | place for place in range(PROMPT)]


def load(client: kvw.Client, space: kvw.Namespace, nodes: list[int], shard: int = 0) -> int:
    out = np.zeros((PROMPT, space.page_bytes), np.uint8)
    loaded = client.open(space).load(nodes, out, shard, timeout_s=5)
    check_pages(out[:loaded], nodes[:loaded], shard, 0)
    return int(loaded)


def flip_some(serving: Serving, rng: random.Random) -> None:
    """At whatever moments there is something to flip."""
    slots = SlotsFile(serving.arena_dir / "slots")
    for _ in range(FLIPS):
        found = eventually(lambda: slots.slots(RESERVED, FILLING), "a slot is unfinished")
        slots.flip(rng.choice(found), rng)
        threading.Event().wait(rng.uniform(0, 0.01))


def dram(client: kvw.Client) -> Any:
    return client.status()["core"]["tiers"]["dram"]


def check_whole(serving: Serving) -> None:
    """Nobody writes any more: every slot is free again, and can be used."""
    with serving.connect(timeout_s=60) as client:

        def settled() -> bool:
            now = dram(client)
            return sum(now[f"{kind}_slots"] for kind in ("reserved", "limbo", "zombie")) == 0

        eventually(settled, "every slot is free again")
        client.clear(all=True)
        eventually(settled, "what was cleared is free")
        for space in (ALONE, RANKS):
            for prompt in range(PROMPTS, PROMPTS + 8):
                check_usable(client, space, nodes_of(prompt))


def check_usable(client: kvw.Client, space: kvw.Namespace, nodes: list[int]) -> None:
    """Stored and loaded; again where this process or the daemon stood still for so long that pages
    were given up."""

    def stored_and_loaded() -> bool:
        for shard in range(space.shards):
            data = pages_of(nodes, shard, 0, space.page_bytes)
            if client.open(space).store(nodes, data, shard, timeout_s=60).dropped:
                return False
        return load(client, space, nodes) == PROMPT

    eventually(stored_and_loaded, "a prompt is stored and loaded")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def test_damage_of_unfinished_slots_while_clients_store_is_never_served_and_costs_no_slot(
    tmp_path: Path, pool: ThreadPoolExecutor, rng: random.Random
) -> None:
    with Serving(tmp_path, **SIZES) as serving:
        for trial in range(tally.rounds(4) if LONG else 2):
            stop = threading.Event()
            ranks = [Rank(serving, rng.getrandbits(32), stop) for _ in range(3)]
            running = [pool.submit(rank.run) for rank in ranks]
            try:
                flip_some(serving, rng)
                if trial % 2:  # what one daemon left half-done and damaged, the next one reads
                    serving.kill()
                    serving.start()
                    flip_some(serving, rng)
                eventually(lambda: any(rank.loaded for rank in ranks), "something was loaded")  # noqa: B023
            finally:
                stop.set()
            for each in running:
                each.result()
            check_whole(serving)
            tally.count(CLASS, FLIPS * (1 + trial % 2))
        assert serving.stop() == 0

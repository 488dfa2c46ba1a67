"""Dynamo's own KV indexer on this daemon's events: what it answers for a prompt is what the
warehouse has of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.process import free_port
from kvwarehouse_bench.harness.serving import Serving
from testkit.kv_subscriber import LossyRelay

BLOCK = 4
PAGE_BYTES = 4096
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="f", layout="t/1", page_tokens=BLOCK, page_bytes=PAGE_BYTES
)
INSTANCE = 7

Prompt = np.ndarray[Any, Any]


class Rig:
    """A daemon, the indexer that was told of it, and prompts that share beginnings."""

    def __init__(self, serving: Serving, indexer: Any, rng: random.Random) -> None:
        self.serving, self.indexer, self.rng = serving, indexer, rng
        stems = [self._tokens(rng.randint(1, 12)) for _ in range(6)]
        self.prompts = [
            np.concatenate([rng.choice(stems), self._tokens(rng.randint(0, 12))]) for _ in range(24)
        ]

    def _tokens(self, pages: int) -> Prompt:
        return np.array([self.rng.randrange(50_000) for _ in range(pages * BLOCK)], np.uint32)

    def store(self, client: kvw.Client, prompts: list[Prompt]) -> None:
        opened = client.open(SPACE)
        for prompt in prompts:
            pages = len(prompt) // BLOCK
            opened.store(prompt, np.zeros((pages, PAGE_BYTES), np.uint8))

    def ours(self, client: kvw.Client, prompt: Prompt) -> tuple[int, int, int]:
        """As the indexer counts: tokens of the longest prefix, and of the longest that is wholly in
        DRAM, and wholly on NVMe."""
        tiers = {page.key: page.tiers for page in client.pages(SPACE)}
        chain = client.open(SPACE).lookup(prompt)
        ends = range(BLOCK, chain.tokens + 1, BLOCK)
        keys = [self.key_of[prompt[:end].tobytes()] for end in ends]
        reach = [0, 0]
        for place, tier in enumerate(("dram", "nvme")):
            for key in keys:
                if tier not in tiers.get(key, ()):
                    break
                reach[place] += BLOCK
        return chain.tokens, reach[0], reach[1]

    def learn_keys(self, client: kvw.Client) -> None:
        """From a watch, which has the token ids of each page."""
        self.key_of: dict[bytes, bytes] = {}
        whole: dict[bytes, bytes] = {b"": b""}
        for message in client.watch(SPACE):
            for change in message.changes:
                if change.stored:
                    whole[change.key] = whole[change.parent] + change.tokens
                    self.key_of[whole[change.key]] = change.key
            if message.synced:
                return

    def replays(self, answer: str) -> float:
        return self.serving.metrics()[f'kvwarehouse_kv_event_replays_total{{answer="{answer}"}}']

    def agrees(self, client: kvw.Client, instance: int = INSTANCE) -> None:
        def equal() -> bool:
            self.learn_keys(client)
            return all(
                self.indexer.held(prompt, instance) == self.ours(client, prompt)
                for prompt in self.prompts
            )

        eventually(equal, "the indexer answers as the warehouse does")


@pytest.fixture
def buffer() -> str:
    return "1MiB"


@pytest.fixture
def rig(tmp_path: Path, indexer: Any, rng: random.Random, buffer: str) -> Iterator[Rig]:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    settings = {"kv_events": events, "kv_events_replay": replay, "kv_events_buffer": buffer}
    with Serving(tmp_path, nvme_capacity="64MiB", **settings) as serving:
        indexer.register(INSTANCE, events, BLOCK, replay)
        yield Rig(serving, indexer, rng)


def test_indexer_answers_as_the_warehouse_does(rig: Rig) -> None:
    with rig.serving.connect() as client:
        rig.store(client, rig.prompts[:12])
        rig.agrees(client)
        client.flush(timeout_s=30)
        rig.agrees(client)
        client.evict(SPACE, pages=40, tiers="dram")
        rig.agrees(client)
        client.evict(SPACE, pages=20, tiers="all")
        rig.agrees(client)
        rig.store(client, rig.prompts)
        rig.agrees(client)
        assert any(rig.indexer.held(prompt)[0] > 0 for prompt in rig.prompts)
        client.clear(SPACE)
        rig.agrees(client)
        assert not any(rig.indexer.held(prompt)[0] for prompt in rig.prompts)


@pytest.mark.parametrize("ending", ["stop", "kill", "reboot"])
def test_indexer_answers_as_the_warehouse_does_after_a_restart(rig: Rig, ending: str) -> None:
    with rig.serving.connect() as client:
        rig.store(client, rig.prompts)
        client.flush(timeout_s=30)
        client.evict(SPACE, pages=30, tiers="dram")
        rig.agrees(client)
    rig.serving.kill() if ending == "kill" else rig.serving.stop()
    if ending == "reboot":
        rig.serving.lose_arena()
    rig.serving.start()
    with rig.serving.connect() as client:
        rig.agrees(client)
        client.evict(SPACE, pages=15, tiers="all")
        rig.agrees(client)


@pytest.mark.parametrize("buffer", ["1MiB", "4KiB"])
def test_indexer_that_missed_events_asks_for_them_and_agrees_again(rig: Rig, buffer: str) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    relay = LossyRelay(rig.serving.settings["kv_events"], endpoint)
    try:
        replay = rig.serving.settings["kv_events_replay"]
        rig.indexer.register(8, endpoint, BLOCK, replay)
        with rig.serving.connect() as client:
            rig.store(client, rig.prompts[:8])
            rig.agrees(client, 8)
            snapshots = rig.replays("snapshot")
            relay.cut.set()
            for _ in range(5):
                rig.store(client, rig.prompts[8:])
                client.evict(SPACE, pages=200, tiers="all")
            rig.store(client, rig.prompts[:16])
            rig.agrees(client)  # the one behind no relay
            assert relay.lost > 0
            relay.cut.clear()
            rig.agrees(client, 8)
            if buffer == "1MiB":
                assert rig.replays("snapshot") == snapshots
            else:  # it is counted when its last message has left
                eventually(lambda: rig.replays("snapshot") > snapshots, "all was said anew")
    finally:
        relay.close()


@pytest.mark.parametrize("buffer", ["4KiB"])
def test_indexer_that_comes_late_hears_what_is_no_longer_buffered(rig: Rig) -> None:
    with rig.serving.connect() as client:
        for _ in range(5):  # more than the buffer holds
            rig.store(client, rig.prompts)
            client.evict(SPACE, pages=200, tiers="all")
        rig.store(client, rig.prompts)
        rig.agrees(client)
        rig.indexer.register(
            8, rig.serving.settings["kv_events"], BLOCK, rig.serving.settings["kv_events_replay"]
        )
        eventually(
            lambda: all(
                rig.indexer.held(prompt, 8) == rig.indexer.held(prompt, INSTANCE)
                for prompt in rig.prompts
            ),
            "the late one answers as the other does",
        )
        eventually(lambda: rig.replays("snapshot") >= 1, "all was said anew")

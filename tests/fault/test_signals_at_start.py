"""A signal to the whole process group of a daemon at a random moment of its start, as a terminal, a
service manager or an impatient script sends it; now and then to the next start as well. Whatever
that left half-done, two orderly starts serve all that was sealed, from the tier that had it, and
nothing that was cleared or evicted.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally
from testkit.known_prompt import KnownPrompt

LONG = tally.rounds(1) > 1  # `make faults`
pytestmark = pytest.mark.timeout(900 if LONG else 240)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP)
SIZES = {"dram": "16MiB", "nvme_capacity": "32MiB", "nvme_segment": "2MiB", "grace_s": "0.1"}
PAGES = 12
MOST = 3  # starts in a row that are signalled


class Kept:
    """A warehouse with prompts that are in one tier, in both, cleared, and evicted."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        begun_s = time.monotonic()
        serving.launch()
        serving.said("starting")
        said_s = time.monotonic()
        serving.said("ready")
        self.start_s, self.own_s = said_s - begun_s, time.monotonic() - said_s
        self.turn = 0
        self.both: list[KnownPrompt] = []
        self.dram, self.nvme = self.prompt("dram"), self.prompt("nvme")
        self.gone: list[KnownPrompt] = []
        with serving.connect(timeout_s=60) as client:
            self.store(client, self.dram, self.nvme)
            self.change(client)

    def prompt(self, model: str) -> KnownPrompt:
        return KnownPrompt(model, pages=PAGES, page_bytes=20_000, version=self.turn)

    def store(self, client: kvw.Client, *prompts: KnownPrompt) -> None:
        for prompt in prompts:
            prompt.store_whole(client)
        result = client.flush(60)
        assert result.pending == result.not_admitted == 0, result

    def change(self, client: kvw.Client) -> None:
        """Something sealed, something cleared and something evicted that no earlier start saw."""
        self.turn += 1
        cleared, evicted = self.prompt("cleared"), self.prompt("evicted")
        self.both = [*self.both[-3:], self.prompt("both")]
        self.store(client, self.both[-1], cleared, evicted)
        assert client.clear(cleared.space) == PAGES
        assert client.evict(evicted.space, PAGES, "all") == PAGES
        client.evict(self.dram.space, PAGES, "nvme")  # a start has written it there
        client.evict(self.nvme.space, PAGES, "dram")
        self.gone = [*self.gone[-6:], cleared, evicted]

    def check(self, client: kvw.Client) -> None:
        assert client.status()["service"]["ledger_health"] == "ok"
        tiers = client.open(self.nvme.space).lookup(self.nvme.nodes).by_tier
        assert (tiers["dram"], tiers["nvme"]) == (0, PAGES)
        tiers = client.open(self.dram.space).lookup(self.dram.nodes).by_tier
        assert (tiers["dram"], tiers["nvme"]) == (PAGES, 0)
        for prompt in self.gone:
            assert prompt.load(client) == 0, f"{prompt.space} is back"
        for prompt in (*self.both, self.dram, self.nvme):
            assert prompt.load(client) == PAGES, f"{prompt.space} has lost pages"
        client.evict(self.nvme.space, PAGES, "dram")

    def end(self, rng: random.Random) -> None:
        """By order or not: the next start begins from either."""
        if rng.random() < 0.5:
            assert self.serving.stop() == 0
        else:
            self.serving.kill()

    def signalled_start(self, rng: random.Random, number: signal.Signals) -> None:
        self.serving.launch(own_group=True)
        # Anywhere in it, or just behind it: that is the point. Most of a start is over before the
        # daemon does anything that is not Python's.
        if rng.random() < 0.8:
            self.serving.said("starting")
            threading.Event().wait(rng.uniform(0, 1.2 * self.own_s))
        else:
            threading.Event().wait(rng.uniform(0, self.start_s))
        status = self.serving.signal_group(number)
        before_ours = status == 1 and not self.serving.events("starting")  # of Python's own start
        assert status in (0, -number, 128 + number) or before_ours, self.serving.tail()
        assert not self.serving.events("ledger_rebuilt")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    serving = Serving(tmp_path, **SIZES)
    try:
        yield Kept(serving)
    finally:
        serving.remove()


def test_nothing_is_lost_and_nothing_comes_back_when_starts_are_ended_by_a_signal_to_the_group(
    kept: Kept, rng: random.Random
) -> None:
    for trial in range(tally.rounds(4) if LONG else 2):
        kept.end(rng)
        sent = [SIGNALS[trial % len(SIGNALS)]]
        sent += rng.choices(SIGNALS, k=rng.randrange(MOST))
        for number in sent:
            kept.signalled_start(rng, number)
        for _ in range(2):
            kept.serving.start()
            with kept.serving.connect(timeout_s=60) as client:
                kept.check(client)
            assert kept.serving.stop() == 0
        for number in sent:
            tally.count(f"{number.name} to a starting daemon's process group")
        kept.serving.start()
        with kept.serving.connect(timeout_s=60) as client:
            kept.change(client)

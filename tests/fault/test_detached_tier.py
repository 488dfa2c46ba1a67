"""The NVMe tier detached for one run or two: a disk that died, or is missing at a start, and comes
back. What was cleared, with or without it, stays away at every start that follows. So does what was
evicted while it was there. All else is there at each of them.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally
from testkit.known_prompt import KnownPrompt

LONG = tally.rounds(1) > 1  # `make faults`
pytestmark = pytest.mark.timeout(900 if LONG else 240)

SIZES = {"dram": "8MiB", "nvme_capacity": "32MiB", "nvme_segment": "2MiB", "grace_s": "0.1"}
TIER = ("nvme_dir", "nvme_capacity", "nvme_segment")
KEPT, CLEARED, EVICTED = (
    KnownPrompt(model, pages=12, page_bytes=20_000) for model in ("kept", "cleared", "evicted")
)


def found(client: kvw.Client, prompt: KnownPrompt) -> int:
    return client.open(prompt.space).lookup(prompt.nodes).pages


class Removals:
    """What was removed, and which of it was stored again, by one order of the dice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.cleared = rng, False

    def remove(self, client: kvw.Client) -> None:
        """A clear, which a run without the tier may do as well; now and then, a store after it."""
        if self.rng.random() < 0.3:
            client.clear(all=True)
            KEPT.store_whole(client)
        else:
            client.clear(CLEARED.space)
        self.cleared = True
        if self.rng.random() < 0.3:
            CLEARED.store_whole(client)
            self.cleared = False

    def check(self, client: kvw.Client) -> None:
        assert KEPT.load(client) == KEPT.pages
        assert CLEARED.load(client) == (0 if self.cleared else CLEARED.pages)
        assert found(client, EVICTED) == 0


def end(serving: Serving, rng: random.Random) -> None:
    serving.kill() if rng.random() < 0.5 else serving.stop()


def test_what_was_removed_stays_away_when_the_tier_was_detached_meanwhile(
    tmp_path: Path, rng: random.Random
) -> None:
    with Serving(tmp_path, **SIZES) as serving:
        for _ in range(tally.rounds(4) if LONG else 3):
            removals = Removals(rng)
            with serving.connect() as client:
                client.clear(all=True)
                for prompt in (KEPT, CLEARED, EVICTED):
                    prompt.store_whole(client)
                assert client.flush().pending == 0
                assert client.evict(EVICTED.space, EVICTED.pages, "all") == EVICTED.pages
                if rng.random() < 0.5:
                    removals.remove(client)
            end(serving, rng)
            detached = {name: serving.settings.pop(name) for name in TIER}
            for _ in range(rng.randrange(1, 3)):
                serving.start()
                with serving.connect() as client:
                    removals.check(client)
                    if not removals.cleared:
                        removals.remove(client)
                end(serving, rng)
            serving.settings.update(detached)
            for start in range(2):
                serving.start()
                with serving.connect() as client:
                    removals.check(client)
                if start == 0:
                    end(serving, rng)
            tally.count("NVMe tier detached for a run or two")

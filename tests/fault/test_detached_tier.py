"""The NVMe tier detached for one run or two: a disk that died, or is missing at a start, and comes
back. What was cleared or evicted, with or without it, stays away at every start that follows. All
else is there at each of them, what was stored again after that too.
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


class Removals:
    """What was removed, and which of it was stored again, by one order of the dice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.cleared, self.evicted = rng, False, False

    def evict(self, client: kvw.Client) -> None:
        """Of all tiers, which a run without one may do as well; now and then, a store after it."""
        assert client.evict(EVICTED.space, EVICTED.pages, "all") == EVICTED.pages
        self.evicted = True
        self.store_evicted(client, 0.3)

    def store_evicted(self, client: kvw.Client, share: float) -> None:
        if self.evicted and self.rng.random() < share:
            EVICTED.store_whole(client)
            self.evicted = False

    def clear(self, client: kvw.Client) -> None:
        """Which a run without the tier may do as well; now and then, a store after it."""
        if self.rng.random() < 0.3:
            client.clear(all=True)
            KEPT.store_whole(client)
            self.evicted = True
        else:
            client.clear(CLEARED.space)
        self.cleared = True
        if self.rng.random() < 0.3:
            CLEARED.store_whole(client)
            self.cleared = False

    def check(self, client: kvw.Client) -> None:
        assert KEPT.load(client) == KEPT.pages
        assert CLEARED.load(client) == (0 if self.cleared else CLEARED.pages)
        assert EVICTED.load(client) == (0 if self.evicted else EVICTED.pages)


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
                if rng.random() < 0.5:
                    removals.evict(client)
                if rng.random() < 0.5:
                    removals.clear(client)
            end(serving, rng)
            detached = {name: serving.settings.pop(name) for name in TIER}
            for _ in range(rng.randrange(1, 3)):
                serving.start()
                with serving.connect() as client:
                    removals.check(client)
                    if not removals.evicted:
                        removals.evict(client)
                    if not removals.cleared:
                        removals.clear(client)
                end(serving, rng)
            serving.settings.update(detached)
            for start in range(3):
                serving.start()
                with serving.connect() as client:
                    removals.check(client)
                    removals.store_evicted(client, 0.5)
                    assert client.flush().pending == 0
                    client.evict(EVICTED.space, EVICTED.pages, "dram")
                if start < 2:
                    end(serving, rng)
            tally.count("NVMe tier detached for a run or two")


def test_what_is_evicted_without_the_tier_stays_away_and_is_kept_once_it_is_stored_again(
    tmp_path: Path,
) -> None:
    """Incident: with the tier it was all found again, unless a clear had taken it."""
    with Serving(tmp_path, **SIZES) as serving:
        with serving.connect() as client:
            for prompt in (KEPT, EVICTED):
                prompt.store_whole(client)
            assert client.flush().pending == 0
        serving.stop()
        detached = {name: serving.settings.pop(name) for name in TIER}
        serving.start()
        with serving.connect() as client:
            assert client.evict(EVICTED.space, EVICTED.pages, "all") == EVICTED.pages
            assert client.evict(KEPT.space, KEPT.pages, "dram") == KEPT.pages
        serving.kill()
        serving.settings.update(detached)
        for start in range(3):
            serving.start()
            with serving.connect() as client:
                assert KEPT.load(client) == KEPT.pages
                assert EVICTED.load(client) == (0 if start < 2 else EVICTED.pages)
                if start == 1:
                    EVICTED.store_whole(client)
                    assert client.flush().pending == 0
                    assert client.evict(EVICTED.space, EVICTED.pages, "dram") == EVICTED.pages
            serving.kill()

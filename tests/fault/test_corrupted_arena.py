"""Bytes that change in the arena while the daemon is down: a damaged page or slot is a miss and is
counted; nothing wrong is served."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit import damage
from testkit.known_prompt import KnownPrompt

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("counted")]

PROMPT = KnownPrompt("m", pages=12, page_bytes=20_000)
BAD = 5


@pytest.mark.parametrize("verify", ["always", "boundary"])
def test_page_flipped_while_the_daemon_was_down_is_a_miss_at_its_first_load(
    dram_only: Serving, verify: Any
) -> None:
    """Also for those who verify at boundaries alone: re-attached memory is one."""
    with dram_only.connect() as client:
        PROMPT.store_whole(client)
        [key] = [page.key for page in client.pages(PROMPT.space) if page.position == BAD]
        dram_only.kill()
        PROMPT.in_arena(dram_only, BAD).flip(at=PROMPT.page_bytes - 1)
        dram_only.start()
        with dram_only.connect(verify=verify) as careful:
            assert PROMPT.load(careful) == BAD
            assert PROMPT.load(careful) == BAD

        def quarantined() -> bool:  # after a report, whose answer nobody waits for
            return bool(client.status()["core"]["quarantined"] == 1)

        eventually(quarantined, "the page is quarantined")

        def told() -> list[str]:
            events = dram_only.events("core")
            return [event["key"] for event in events if event["name"] == "page_quarantined"]

        # As `ls` and `check` name it.
        eventually(lambda: told() == [key.hex()], "the log names the page")


def test_slot_with_a_damaged_header_is_dropped_at_the_start_and_counted(
    dram_only: Serving, rng: random.Random
) -> None:
    with dram_only.connect() as client:
        PROMPT.store_whole(client)
        [key] = [page.key for page in client.pages(PROMPT.space) if page.position == BAD]
    dram_only.kill()
    slots = dram_only.arena_dir / "slots"
    # checksum 8, namespace 16, key 16: the key lies 24 bytes into the record of its slot.
    record = slots.read_bytes().index(key) - 24
    damage.Place(slots, record).flip(rng.randrange(8), at=rng.randrange(8, 40))
    dram_only.start()
    with dram_only.connect() as client:
        assert client.status()["core"]["recovery"]["dropped_slots"] == 1
        assert PROMPT.load(client) == BAD


def test_noise_over_all_slot_headers_serves_nothing_wrong(
    dram_only: Serving, rng: random.Random
) -> None:
    with dram_only.connect() as client:
        PROMPT.store_whole(client)
        dram_only.kill()
        slots = dram_only.arena_dir / "slots"
        size = slots.stat().st_size
        place = damage.Place(slots, 2 * 4096)  # past the file's header and the cuts of its slabs
        data = bytearray(place.read(size - 2 * 4096))
        for at in range(len(data)):
            if data[at]:
                data[at] = rng.getrandbits(8)
        place.write(bytes(data))
        dram_only.start()
        assert PROMPT.load(client) == 0
        assert client.status()["core"]["tiers"]["dram"]["pages"] == 0

        def stored() -> bool:
            return PROMPT.store(client).dropped == {}

        eventually(stored, "the slots are usable again")
        assert PROMPT.load(client) == PROMPT.pages

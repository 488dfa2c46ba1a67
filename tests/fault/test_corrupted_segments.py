"""Segments that are damaged, cut short or foreign when the daemon starts: their pages are misses,
and what is whole is served."""

from __future__ import annotations

import random
import shutil

import pytest

from kvwarehouse_bench.harness.serving import Serving
from testkit.known_prompt import KnownPrompt

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("counted")]

PROMPT = KnownPrompt("m", pages=12, page_bytes=20_000)
OTHER = KnownPrompt("other", pages=12, page_bytes=20_000)
BAD = 5


def start_again(serving: Serving) -> None:
    """With NVMe alone, as after a loss of power."""
    serving.kill()
    serving.lose_arena()
    serving.start()


@pytest.mark.parametrize("orderly", [True, False])
def test_records_damaged_while_the_daemon_was_down_are_misses(
    both_tiers: Serving, rng: random.Random, orderly: bool
) -> None:
    """Closed segments are believed by their table and checked when read; open ones are scanned."""
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
    if orderly:
        both_tiers.stop()
    else:
        both_tiers.kill()
    both_tiers.lose_arena()
    PROMPT.in_segments(both_tiers, BAD).flip(rng.randrange(8), at=rng.randrange(PROMPT.page_bytes))
    both_tiers.start()
    with both_tiers.connect() as client:
        assert PROMPT.load(client) == BAD
        status = client.status()["core"]
        assert status["recovery"]["refused_records"] + status["quarantined"] == 1
    start_again(both_tiers)
    with both_tiers.connect() as client:
        assert PROMPT.load(client) == BAD
        PROMPT.store(client)
        assert client.flush().pending == 0
    start_again(both_tiers)
    with both_tiers.connect() as client:
        assert PROMPT.load(client) == PROMPT.pages


def test_segments_cut_short_zeroed_or_full_of_noise_are_no_obstacle(
    both_tiers: Serving, rng: random.Random
) -> None:
    with both_tiers.connect() as client:
        PROMPT.store_whole(client)
        OTHER.store_whole(client)
        assert client.flush().pending == 0
    both_tiers.kill()
    both_tiers.lose_arena()
    for number, path in enumerate(both_tiers.segments):
        kind = number % 3
        data = path.read_bytes()
        half = len(data) // 2
        path.write_bytes((data[:half], bytes(len(data)), rng.randbytes(len(data)))[kind])
    both_tiers.start()
    with both_tiers.connect() as client:
        PROMPT.load(client)
        OTHER.load(client)
        client.clear(all=True)
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
        assert client.status()["core"]["tiers"]["nvme"]["health"] == "ok"
        assert client.evict(PROMPT.space, PROMPT.pages) == PROMPT.pages
        assert PROMPT.load(client) == PROMPT.pages
    start_again(both_tiers)
    with both_tiers.connect() as client:
        assert PROMPT.load(client) == PROMPT.pages
        assert OTHER.load(client) == 0


def test_segment_of_another_warehouse_is_neither_served_nor_touched(
    both_tiers: Serving, another: Serving
) -> None:
    with another.connect() as client:
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
    another.stop()
    both_tiers.stop()
    copied = both_tiers.nvme_dir / "segments" / "00000400.seg"
    shutil.copyfile(PROMPT.in_segments(another, 0).path, copied)
    kept = copied.read_bytes()
    both_tiers.start()
    with both_tiers.connect() as client:
        assert client.status()["core"]["recovery"]["foreign_segments"] == 1
        assert PROMPT.load(client) == 0
        PROMPT.store_whole(client)
        assert client.flush().pending == 0
        assert PROMPT.load(client) == PROMPT.pages
    start_again(both_tiers)
    with both_tiers.connect() as client:
        assert client.status()["core"]["recovery"]["foreign_segments"] == 1
        assert PROMPT.load(client) == PROMPT.pages
    assert copied.read_bytes() == kept

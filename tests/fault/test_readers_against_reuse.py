"""Readers in processes of their own against a daemon that evicts and reuses slots as fast as
writers can store: every load is right or a miss. Through stale entries and generations, with a page
size that takes the other's slabs, an index whose windows are full, and an arena that grows
meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally

LONG = tally.rounds(1) > 1
FOUND_S = 30.0
pytestmark = pytest.mark.timeout(900 if LONG else 240)

SMALL = kvw.Namespace(
    model="small", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=8192
)
LARGE = kvw.Namespace(
    model="large", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=100_000
)

# Stores prompts of its own without end, of both page sizes by turns, until it hears something.
WRITER = """
import random, select
rng = random.Random(given["seed"])
spaces = [kvw.Namespace(**fields) for fields in given["spaces"]]
opened = [client.open(space) for space in spaces]
say("ready")
number = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    which = rng.randrange(len(spaces)) if number % 40 == 0 else which
    first = rng.randrange(given["prompts"]) * 16
    nodes = list(range(first, first + 16))
    pages = pages_of(nodes, 0, which, spaces[which].page_bytes)
    opened[which].store(nodes, pages, timeout_s=30)
    number += 1
say(number)
"""

# Looks prompts up, loads and pins them, told how many pages to load; every byte is compared.
READER = """
import random
from kvwarehouse_bench.harness.pages import check_pages
rng = random.Random(given["seed"])
spaces = [kvw.Namespace(**fields) for fields in given["spaces"]]
opened = [client.open(space) for space in spaces]
say("ready")
while goal := hear():
    loads = pages = short = pinned = 0
    missed = {}
    while loads < goal:
        which = rng.randrange(len(spaces))
        ns, space = opened[which], spaces[which]
        first = rng.randrange(given["prompts"]) * 16
        nodes = list(range(first, first + 16))
        out = np.zeros((16, space.page_bytes), np.uint8)
        if rng.random() < 0.3:
            with ns.pin(nodes) as pins:
                loaded = ns.load(nodes, out, timeout_s=30)
                assert loaded >= pins.pages, f"{loaded} of {pins.pages} pinned"
                pinned += pins.pages
        else:
            loaded = ns.load(nodes, out, timeout_s=30)
        check_pages(out[:loaded], nodes[:loaded], 0, which)
        loads += 1
        pages += int(loaded)
        short += loaded < 16
        for reason, count in loaded.missed.items():
            missed[reason] = missed.get(reason, 0) + count
    say([loads, pages, short, pinned, missed])
"""


@pytest.fixture
def crowd() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(
    crowd: ExitStack, serving: Serving, program: str, rng: random.Random, **given: Any
) -> ClientProcess:
    process = ClientProcess(serving.address, program, seed=rng.getrandbits(32), **given)
    crowd.enter_context(process)
    assert process.hear() == "ready"
    return process


def race(
    crowd: ExitStack,
    serving: Serving,
    rng: random.Random,
    spaces: list[kvw.Namespace],
    loads: int,
    why: str = "",
) -> None:
    """Writers and readers, two of each where there is time, until pages have been found, and some
    have left DRAM for that reason.
    """
    each = range(2 if LONG else 1)
    given = {"spaces": [space.to_fields() for space in spaces], "prompts": 120}
    writers = [start(crowd, serving, WRITER, rng, **given) for _ in each]
    readers = [start(crowd, serving, READER, rng, **given) for _ in each]
    # A few prompts may be all that is stored for a while, and none of them asked for: readers may
    # be the faster ones by far.
    found = gone = 0
    with serving.connect(timeout_s=60) as client:
        until = time.monotonic() + FOUND_S
        while not (found and gone) and time.monotonic() < until:
            found += read(readers, loads)
            gone = left(client.status()["core"], why) if why else 1
    for writer in writers:
        writer.tell("end")
    assert sum(writer.hear() for writer in writers) > 0
    assert found > 0, "nothing was there to be read"
    assert gone > 0, f"nothing has left for this reason: {why}"
    with serving.connect(timeout_s=60) as client:
        core: dict[str, Any] = client.status()["core"]
    assert core["quarantined"] == 0
    assert core["loads"]["failed"].get("mismatch", 0) == 0


def read(readers: list[ClientProcess], loads: int) -> int:
    """Pages that they found, of so many loads each."""
    found = 0
    for reader in readers:
        reader.tell(loads)
    for reader in readers:
        done, pages, _, _, missed = reader.hear()
        assert "mismatch" not in missed
        found += pages
        tally.count("read under eviction and reuse at full speed", done)
    return found


def left(core: dict[str, Any], why: str) -> int:
    return int(core["tiers"]["dram"]["left"].get(why, 0))


def test_loads_are_right_or_a_miss_while_every_slot_is_reused(
    crowd: ExitStack, tmp_path: Path, rng: random.Random
) -> None:
    with Serving(tmp_path, dram="8MiB") as serving:
        race(crowd, serving, rng, [SMALL], loads=4000 if LONG else 150, why="evicted")


def test_loads_are_right_or_a_miss_while_slabs_change_hands(
    crowd: ExitStack, tmp_path: Path, rng: random.Random
) -> None:
    with Serving(tmp_path, dram="8MiB") as serving:
        race(crowd, serving, rng, [SMALL, LARGE], loads=2000 if LONG else 100, why="evicted")


def test_loads_are_right_or_a_miss_while_the_index_is_full(
    crowd: ExitStack, tmp_path: Path, rng: random.Random
) -> None:
    with Serving(tmp_path, dram="32MiB", index_pages="512") as serving:
        race(crowd, serving, rng, [SMALL], loads=2000 if LONG else 100, why="evicted")


def test_loads_are_right_or_a_miss_while_the_arena_grows_and_after_a_larger_start(
    crowd: ExitStack, tmp_path: Path, rng: random.Random
) -> None:
    with Serving(tmp_path, dram="8MiB") as serving:
        with serving.connect() as client:
            client.open(SMALL)
        for dram in ("16MiB", "32MiB", "64MiB") if LONG else ("32MiB",):
            serving.kill()
            serving.settings["dram"] = dram
            serving.start()  # serves while its new slabs are allocated
            race(crowd, serving, rng, [SMALL, LARGE], loads=400 if LONG else 25)

"""Bytes flipped at random in every file of a running daemon, while a client loads: whatever is hit,
a client is given right bytes or a miss, and the warehouse goes on. What does not hold together any
more is dropped, stored again, and served again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally
from testkit.damage import Place

pytestmark = pytest.mark.timeout(1200)

PAGE_BYTES = 6_000
PAGES = 40
NODES = list(range(PAGES))
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
SIZES = {"dram": "8MiB", "nvme_capacity": "16MiB", "nvme_segment": "1MiB", "grace_s": "0.1"}
FLIPS = 5  # of one file, between two looks


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, **SIZES) as serving:
        yield serving


def in_use(path: Path) -> list[int]:
    """Offsets of blocks that hold something."""
    blocks = []
    with path.open("rb") as file:
        at, end = 0, os.fstat(file.fileno()).st_size
        while at < end:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            stop = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            data = os.pread(file.fileno(), stop - at, at)
            blocks += [at + i for i in range(0, len(data), 512) if any(data[i : i + 512])]
            at = stop
    return blocks


def files_of(serving: Serving, kind: str) -> list[Path]:
    if kind == "segments":
        return serving.segments
    name = "index.*" if kind == "the index" else kind.removeprefix("the ")
    return sorted(serving.arena_dir.glob(name))


def flip_some(serving: Serving, kind: str, rng: random.Random) -> None:
    # The daemon makes segments ahead of their use: one of them may hold nothing yet.
    held = [(path, in_use(path)) for path in files_of(serving, kind)]
    path, blocks = rng.choice([(path, blocks) for path, blocks in held if blocks])
    for _ in range(FLIPS):
        Place(path, rng.choice(blocks)).flip(rng.randrange(8), at=rng.randrange(512))


class Visitor:
    """A client that loads, and never sees a wrong byte; it connects again when it must."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def load(self) -> int:
        out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        with self.serving.connect() as client:
            loaded = client.open(SPACE).load(NODES, out, timeout_s=60)
        check_pages(out[:loaded], NODES[:loaded], 0, 0)
        return int(loaded)

    def store(self) -> None:
        with self.serving.connect() as client:
            client.sweep()
            client.open(SPACE).store(NODES, pages_of(NODES, 0, 0, PAGE_BYTES), timeout_s=60)
            client.flush()

    def evict(self) -> None:
        with self.serving.connect() as client:
            client.evict(SPACE, PAGES)


@pytest.mark.parametrize("kind", ["the arena", "slots", "the index", "segments"])
def test_bytes_flipped_under_a_running_daemon_are_never_served(
    serving: Serving, rng: random.Random, kind: str
) -> None:
    visitor = Visitor(serving)
    visitor.store()
    assert visitor.load() == PAGES
    pid = serving.pid
    for turn in range(tally.rounds(3)):
        flip_some(serving, kind, rng)
        visitor.load()
        if turn % 3 == 1:
            visitor.evict()  # what is read next comes from NVMe
            visitor.load()
        visitor.store()
        visitor.load()
        tally.count(f"bytes of {kind} flipped under a running daemon", FLIPS)
    assert serving.pid == pid
    with serving.connect() as client:
        client.clear(all=True)
    visitor.store()


@pytest.mark.parametrize(
    ("name", "header_bytes"), [("index.*", 48), ("slots", 88), ("control", 56)]
)
def test_headers_that_change_under_a_running_daemon_are_right_for_the_next_client(
    serving: Serving, rng: random.Random, name: str, header_bytes: int
) -> None:
    visitor = Visitor(serving)
    visitor.store()
    header = Place(next(serving.arena_dir.glob(name)), 0)
    made = header.read(header_bytes)
    for _ in range(tally.rounds(3)):
        for at in rng.sample(range(header_bytes), FLIPS):
            header.flip(rng.randrange(8), at=at)
        assert visitor.load() == PAGES
        assert header.read(header_bytes) == made
        tally.count("header bytes flipped under a running daemon", FLIPS)

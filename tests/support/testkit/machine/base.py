"""A real `kvwarehouse serve` beside dictionaries of what it may hold: its clients, what they store
and load, and the books. What makes pages leave, daemons end and disks fail is in the files beside
this one; the test is tests/property/test_against_reference_model.py. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.daemon.identity import establish
from kvwarehouse.daemon.logs import Log
from kvwarehouse_bench.harness.serving import Serving
from testkit import accounting
from testkit.faulty_disk import FaultyDisk
from testkit.reference_model import ReferenceModel

# Small enough that evictions, reclaim and slabs changing hands happen all the time.
SIZES = {
    "dram": "16MiB",
    "nvme_capacity": "48MiB",
    "nvme_segment": "4MiB",
    "grace_s": "0.1",
    "limbo_after_s": "3600",
    "flush_interval_s": "0.1",
    "nvme_retry_s": "0.2",
}
SPACES = (
    kvw.Namespace(
        model="small", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=16384
    ),
    kvw.Namespace(
        model="wide", weights="w", dtype="uint8", layout="t/1", page_tokens=3, page_bytes=20000,
        shards=3,
    ),
)  # fmt: skip
WAIT_S = 60.0
STORE_S = 15.0  # far more than a store takes; one that finds no room for so long is dropped
MOST_UNFINISHED = 12  # pages that wait for a shard; with a batch, below an eighth of the arena
BATCH = 16  # pages of one store where there are several shards
LONGEST = 600  # pages of a prompt
MOST_PINS = 4
CALM = 5  # steps between ends of the daemon
TRAFFIC = ["store_branch"] * 6 + ["load"] * 4 + ["store_again", "look_up", "replace_client"]

space_numbers = st.integers(0, len(SPACES) - 1)
places = st.integers(0, 2**16)  # of a node, modulo how many there are
seeds = st.integers(0, 2**32 - 1)


class Held:
    """Pins, and what they hold."""

    def __init__(self, pins: kvw.Pins, space: int, nodes: tuple[int, ...]) -> None:
        self.pins, self.space, self.nodes = pins, space, nodes


class MachineBase(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = tempfile.TemporaryDirectory(prefix="kvw-test-")
        self.serving = Serving(Path(self.disk.name), **SIZES)
        self.faulty_disk: FaultyDisk | None = None  # where the disk can be made to fail
        self.flipped: set[bytes] = set()  # keys of pages that had a bit flipped, in any life
        self.reads_failed = False  # by a rule, in any life
        self.clients: list[kvw.Client] = []
        self.held: list[Held] = []
        self.steps = self.asked = 0
        self.cleared = False

    def teardown(self) -> None:
        try:
            if self.clients and sys.exc_info()[0] is None:
                self.audit()
        finally:
            self.disconnect()
            self.serving.remove()
            self.disk.cleanup()

    @initialize(
        hog=st.none() | space_numbers,
        faulty=st.booleans(),
        policy=st.sampled_from(["lru", "adaptive"]),
    )
    def start(self, hog: int | None, faulty: bool, policy: str) -> None:
        """`hog`: who has taken the whole arena before anyone else comes. `faulty`: the disk can be
        made to fail, which only the pread engine lets be seen."""
        if faulty:
            self.make_disk_faulty()
        self.serving.settings["policy"] = policy
        self.serving.start()
        # Only read: the daemon has made it.
        who = establish([str(self.serving.arena_dir)], Log("json", io.StringIO()))
        self.books = [ReferenceModel(space, who.secret) for space in SPACES]
        self.connect()
        self.begin_stretch()
        if hog is not None:
            self.flood(hog, 12, 96 // len(SPACES) ** hog, False)

    def make_disk_faulty(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # no compiler: then without
            self.faulty_disk = FaultyDisk(Path(self.disk.name), self.serving.nvme_dir / "segments")
            self.serving.settings["io_engine"] = "pread"
            self.serving.environment = self.faulty_disk.environment()

    # --- clients: local, local that trusts memory it has checked once, remote

    def connect(self) -> None:
        self.clients = [
            self.serving.connect(timeout_s=WAIT_S),
            self.serving.connect(timeout_s=WAIT_S, verify="boundary"),
            self.serving.connect_remote(timeout_s=WAIT_S),
        ]
        self.open()

    def open(self) -> None:
        self.opened = [[client.open(space) for space in SPACES] for client in self.clients]

    def disconnect(self) -> None:
        for held in self.held:
            held.pins.release()
        self.held.clear()
        for client in self.clients:
            client.close()
        self.clients = []

    @property
    def admin(self) -> kvw.Client:
        return self.clients[2]

    # --- stores

    @rule(count=st.integers(4, 20), seed=seeds)
    def traffic(self, count: int, seed: int) -> None:
        """Drawn from a seed, because Hypothesis draws so many numbers and no more for a run."""
        self.steps += 1
        self.traffic_of(random.Random(seed), count)

    def traffic_of(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            space, place, number = (
                rng.randrange(len(SPACES)),
                rng.getrandbits(20),
                rng.getrandbits(8),
            )
            getattr(self, rng.choice(TRAFFIC))(space, place, number, rng.randrange(3))

    def store_branch(self, space: int, place: int, number: int, client: int) -> None:
        """A prompt that shares a prefix with another, or a new one; now and then without some of
        its shards."""
        book = self.books[space]
        count = 1 + number % 40
        parent = place % (book.nodes + 1) - 1 if place % 4 else -1
        if parent >= 0 and len(book.path(parent)) + count > LONGEST:
            parent = -1
        path = book.path(book.grow(parent, count))
        shards = set(range(book.space.shards))
        # Only where every page is new: what was evicted would be unfinished too, and uncounted.
        if parent < 0 and number % 3 == 0 and book.unfinished() + count <= MOST_UNFINISHED:
            shards.discard(number % book.space.shards)
        self.store(space, path, shards, client)

    def store_again(self, space: int, place: int, number: int, client: int) -> None:
        book = self.books[space]
        if book.nodes:
            path = book.path(place % book.nodes)
            self.store(space, path, set(range(book.space.shards)), client, number)

    def look_up(self, space: int, place: int, number: int, client: int) -> None:
        if self.books[space].nodes:
            self.lookup(space, self.books[space].path(place % self.books[space].nodes), client)

    def load(self, space: int, place: int, number: int, client: int) -> None:
        book = self.books[space]
        if book.nodes:
            path = book.path(place % book.nodes)
            shard, wait_s = number % book.space.shards, WAIT_S if number % 4 else 0.0
            self.check_load(space, path, shard, client, wait_s)

    def replace_client(self, space: int, place: int, number: int, client: int) -> None:
        if client < 2 and self.held:
            return  # a session's pins end with it
        self.clients[client].close()
        if client < 2:
            verify: Any = "boundary" if client else "always"
            self.clients[client] = self.serving.connect(timeout_s=WAIT_S, verify=verify)
        else:
            self.clients[client] = self.serving.connect_remote(timeout_s=WAIT_S)
        self.open()

    @rule(
        space=space_numbers,
        chains=st.integers(1, 5),
        count=st.integers(16, 96),
        tail=st.booleans(),
    )
    def store_flood(self, space: int, chains: int, count: int, tail: bool) -> None:
        """Chains of new pages, with a common trunk or without: more than a slab of them."""
        self.steps += 1
        self.flood(space, chains, count, tail)

    def flood(self, space: int, chains: int, count: int, tail: bool) -> None:
        book = self.books[space]
        trunk = book.grow(-1, count // 4) if tail else -1
        for _ in range(chains):
            self.store(space, book.path(book.grow(trunk, count)), set(range(book.space.shards)), 0)

    def store(
        self, space: int, path: tuple[int, ...], shards: set[int], client: int, first: int = 0
    ) -> None:
        # Ranks go side by side: pages that wait for a shard hold an eighth of the arena at most.
        step = len(path) if self.books[space].space.shards == 1 else BATCH
        for begin in range(min(first, len(path) - 1), len(path), step):
            for shard in sorted(shards):
                self.store_shard(space, path[: begin + step], begin, shard, client)

    def store_shard(
        self, space: int, path: tuple[int, ...], first: int, shard: int, client: int
    ) -> None:
        book, nodes = self.books[space], path[first:]
        book.offer(nodes, shard)
        result = self.opened[client][space].store(
            book.tokens(path), book.pages(nodes, shard), shard, first=first, timeout_s=STORE_S
        )
        dropped = sum(result.dropped.values())
        assert result.stored + result.already + dropped == len(nodes)
        if not dropped:
            book.report(nodes, shard)

    # --- lookups and loads

    def lookup(self, space: int, path: tuple[int, ...], client: int) -> int:
        book = self.books[space]
        match = self.opened[client][space].lookup(book.tokens(path))
        self.asked += len(path)
        assert match.pages <= book.longest(path)
        assert match.tokens == match.pages * book.space.page_tokens
        assert sum(match.by_tier.values()) == match.pages
        return match.pages

    def check_load(
        self, space: int, path: tuple[int, ...], shard: int, client: int, timeout_s: float
    ) -> int:
        book = self.books[space]
        out = np.zeros((len(path), book.space.page_bytes), np.uint8)
        loaded = self.opened[client][space].load(
            book.tokens(path), out, shard=shard, timeout_s=timeout_s
        )
        assert loaded <= book.longest(path)
        book.check(out[:loaded], path[:loaded], shard)
        assert loaded == len(path) or loaded.missed
        assert self.flipped or "mismatch" not in loaded.missed
        if timeout_s:
            assert "timeout" not in loaded.missed, f"{loaded} of {len(path)} pages in {timeout_s} s"
        return loaded

    def command(self, *arguments: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert main([*arguments, "--socket", self.serving.socket, "--json"]) == 0
        return said.getvalue()

    def flush(self) -> None:
        assert self.admin.flush(WAIT_S).pending == 0

    def check_pins(self) -> None:
        for held in self.held:
            if held.nodes:
                self.check_load(held.space, held.nodes, 0, 0, 0.0)
                match = self.opened[0][held.space].lookup(self.books[held.space].tokens(held.nodes))
                self.asked += len(held.nodes)
                assert match.by_tier["dram"] == len(held.nodes), "a pinned page has left"

    # --- the books

    def begin_stretch(self) -> None:
        """From here on one daemon keeps the counters."""
        self.snapshot = accounting.quiet_snapshot(self.admin, self.books)
        self.asked = self.steps = 0
        self.cleared = False
        recovery = self.snapshot.core["recovery"]
        assert recovery["unknown_namespace"] == recovery["foreign_segments"] == 0, recovery
        # What was quarantined has no good checksum until its slot is free: a kill may come before.
        assert recovery["dropped_slots"] <= len(self.flipped), recovery
        assert recovery["refused_records"] <= len(self.flipped), recovery

    @rule()
    def audit(self) -> None:
        self.steps += 1
        self.check_pins()
        after = accounting.quiet_snapshot(self.admin, self.books)
        accounting.check_sums(self.snapshot, after, cleared=self.cleared)
        accounting.check_listing(after, self.books)
        accounting.check_owed(self.snapshot, after, self.books)
        self.check_counters(after)
        self.snapshot, self.cleared, self.asked = after, False, 0
        for space, book in enumerate(self.books):  # what is listed, a lookup finds
            for node in range(max(0, book.nodes - 200), book.nodes, 40):
                path = book.path(node)
                there = [one in after.listed[space] for one in path]
                stored = there.index(False) if False in there else len(path)
                assert self.lookup(space, path, node % 3) == stored

    def check_counters(self, after: accounting.Snapshot) -> None:
        assert after.asked() - self.snapshot.asked() == self.asked
        scraped = self.serving.metrics()
        hits = [
            scraped[f'kvwarehouse_lookup_hit_pages_total{{tier="{tier}"}}']
            for tier in ("hbm", "dram", "nvme", "remote")
        ]
        assert sum(hits) + scraped["kvwarehouse_lookup_missed_pages_total"] == after.asked()
        for tier, status in (("dram", after.dram), ("nvme", after.nvme)):
            for reason, count in status["left"].items():
                assert scraped[f'kvwarehouse_{tier}_left_pages_total{{reason="{reason}"}}'] == count
        self.check_mismatches(after)
        assert after.nvme["health"] == "ok"

    def check_mismatches(self, after: accounting.Snapshot) -> None:
        """Only what a rule has damaged was found damaged."""
        events = self.serving.events("core")
        found = [event for event in events if event["name"] == "page_quarantined"]
        found = [event for event in found if "more" not in event]  # a number of others
        # What the disk did not give, and was stored anew or dropped by a repair, is not damaged.
        unread = [event for event in found if event["reason"] == "io_error"]
        assert self.reads_failed or not unread, unread
        named = {event["key"] for event in found if event["reason"] != "io_error"}
        ours = {key.hex() for key in self.flipped}
        assert named <= ours, f"damaged, though nobody damaged them: {named - ours}"
        if not self.flipped:
            assert after.nvme["mismatches"] == 0
            assert self.reads_failed or after.core["quarantined"] == 0
            assert after.core["loads"]["failed"].get("mismatch", 0) == 0

    def restart(self, tiers: tuple[str, ...]) -> None:
        before = self.snapshot
        self.serving.start()
        for book in self.books:
            book.restart()
        if not self.clients:
            self.connect()
        self.begin_stretch()
        accounting.check_listing(self.snapshot, self.books)
        accounting.check_survived(before, self.snapshot, self.books, tiers)
        self.check_pins()

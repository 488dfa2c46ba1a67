"""Rules by which disks fail and bits flip under a daemon that is in use."""

from __future__ import annotations

import errno
import random

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvwarehouse_bench.harness.eventually import eventually
from testkit import accounting, damage, tally
from testkit.machine.base import MachineBase, places, seeds, space_numbers

_ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS)


class Faults(MachineBase):
    # --- the disk

    @precondition(lambda self: self.faulty_disk is not None)
    @rule(
        kind=st.sampled_from(["read", "write", "sync"]),
        error=st.sampled_from(_ERRORS),
        every=st.integers(1, 4),
        seed=seeds,
    )
    def fail(self, kind: str, error: int, every: int, seed: int) -> None:
        """The disk refuses what it is asked, or some of it, while everybody goes on."""
        assert self.faulty_disk is not None
        self.steps += 1
        before = self.faulty_disk.struck
        self.faulty_disk.set(**{kind: error, "every": every})
        self.reads_failed |= kind == "read"
        self.traffic_of(random.Random(seed), 8)
        self.faulty_disk.heal()
        eventually(
            lambda: self.admin.status()["core"]["tiers"]["nvme"]["health"] == "ok",
            "the NVMe tier recovers by itself",
        )
        if self.faulty_disk.struck > before:
            tally.count("disk failed under random operations", self.faulty_disk.struck - before)

    # --- bits

    @rule(space=space_numbers, place=places, tier=st.sampled_from(["dram", "nvme"]), seed=seeds)
    def flip(self, space: int, place: int, tier: str, seed: int) -> None:
        """One bit of a page that is there. The client that is told next finds out, and from then on
        nobody is given it: the one that trusts memory it has seen never sees it damaged."""
        self.steps += 1
        snapshot = accounting.quiet_snapshot(self.admin, self.books)
        node = self.damageable(snapshot, space, place, tier)
        if node is None:
            return
        book, rng = self.books[space], random.Random(seed)
        shard = rng.randrange(book.space.shards)
        page = book.pages([node], shard)[0]
        files = [self.serving.arena_dir / "arena"] if tier == "dram" else self.serving.segments
        found = damage.find(files, page)
        if len(found) != 1:
            return  # bytes of an earlier copy are still about: which is which is not ours to know
        key = next(
            each.key for each in self.admin.pages(book.space) if book.is_node(each.key, node)
        )
        self.flipped.add(key)
        found[0].flip(rng.randrange(8), at=rng.randrange(book.space.page_bytes))
        # Checks every byte of what comes; the page itself may come from the other tier.
        self.check_load(space, book.path(node), shard, 0, 60.0)
        # The daemon was told with that load, or is told by a check of its own.
        for _ in self.admin.check(book.space, repair=True):
            pass
        book.gone([node])
        tally.count(f"bit flipped in the {_WHERE[tier]} between random operations")

    def damageable(
        self, snapshot: accounting.Snapshot, space: int, place: int, tier: str
    ) -> int | None:
        """A node that is in this tier alone, with all its ancestors in some, and not pinned."""
        book, listed = self.books[space], snapshot.listed[space]
        held = {node for each in self.held if each.space == space for node in each.nodes}
        chosen = [
            node
            for node, tiers in sorted(listed.items())
            if tier in tiers
            and (tier == "dram" or tiers == {"nvme"})
            and node not in held
            and all(one in listed for one in book.path(node))
        ]
        return chosen[place % len(chosen)] if chosen else None


_WHERE = {"dram": "arena", "nvme": "segments"}

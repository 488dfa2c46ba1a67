"""What a daemon keeps for engines: which pages, and where in the arena they lie.

Pages of the connector's self-test count as none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from testkit.damage import Place
from vllm_rig.daemon import Daemon

_BLOCK = 4096
_SELF_TEST = "kvwarehouse/self-test"

Sums = NDArray[np.uint64]


class StoredPages:
    """Reads with a client of its own, over gRPC: it takes no part in what the engine's do."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._client: kvw.Client | None = None
        self._starts = 0

    @property
    def client(self) -> kvw.Client:
        """Of the daemon that runs now."""
        if self._client is None or self._starts != self._daemon.starts:
            self.close()
            self._client = self._daemon.connect_remote()
            self._starts = self._daemon.starts
        return self._client

    def spaces(self) -> list[kvw.Namespace]:
        found = [stored.space for stored in self.client.namespaces()]
        return [space for space in found if space.model != _SELF_TEST]

    def keys(self) -> set[bytes]:
        """Of all pages in all tiers."""
        return {page.key for space in self.spaces() for page in self.client.pages(space)}

    def wait_new(self, before: set[bytes], count: int) -> set[bytes]:
        """Waits until `count` pages are there that were not before."""
        if count == 0:
            return set()

        def new() -> set[bytes] | None:
            found = self.keys() - before
            return found if len(found) >= count else None

        return eventually(new, f"{count} pages stored behind the engine")

    def only_on_nvme(self) -> None:
        """Takes every page out of DRAM; what was not on NVMe yet is, before."""
        assert self.client.flush().pending == 0
        self.client.evict(None, 100_000)
        held = self.client.status()["core"]["tiers"]["dram"]["pages"]
        assert held == 0, f"{held} pages are in DRAM still"

    def bad_pages(self) -> list[tuple[bytes, str]]:
        """Whose bytes are not what was stored, as the daemon finds out by reading them all."""
        return [bad for progress in self.client.check() for bad in progress.bad]

    def described(self) -> str:
        """The daemon's status, for people who read a failure."""
        try:
            return json.dumps(self.client.status()["core"], indent=1)
        except kvw.WarehouseError as error:
            return f"it has none to give: {error}"

    # --- the arena

    def arena(self) -> Sums:
        """Of each 4 KiB of it a sum, which changes with what is written there."""
        words = np.memmap(self._file, np.uint64, "r")
        return words.reshape(-1, _BLOCK // words.itemsize).sum(axis=1)

    def changed(self, before: Sums, page_bytes: int) -> list[Place]:
        """Where pages were written since `before`, in the order of the arena."""
        now = self.arena()
        known = np.zeros_like(now)  # of a slab that is new
        known[: len(before)] = before
        blocks = np.flatnonzero(now != known)
        stride = -(-page_bytes // _BLOCK)
        places = []
        while len(blocks):
            places.append(Place(self._file, int(blocks[0]) * _BLOCK))
            blocks = blocks[blocks >= blocks[0] + stride]
        return places

    @property
    def _file(self) -> Path:
        return self._daemon.arena_dir / "arena"

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def flip_each(places: Sequence[Place], at: int = 0) -> None:
    """One bit in each page, `at` bytes from its begin."""
    for place in places:
        place.flip(3, at=at)

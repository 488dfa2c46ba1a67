"""A disk that failed while pages were stored, and is well again when nobody stores any more: all
that is sealed reaches NVMe by itself. No call but status is made until it has.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally
from testkit.faulty_disk import FaultyDisk

LONG = tally.rounds(1) > 1  # `make faults`
pytestmark = pytest.mark.timeout(900 if LONG else 240)

PAGE_BYTES = 64 << 10
PROMPT = 12
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
SIZES = {
    "dram": "32MiB",
    "nvme_capacity": "64MiB",
    "nvme_segment": "2MiB",
    "write_queue": "1MiB",  # so that pages miss it as well
    "grace_s": "0.1",
    "flush_interval_s": "0.05",
    "nvme_retry_s": "0.2",
    "io_engine": "pread",  # the library does not see what io_uring does
}


@pytest.fixture
def serving(tmp_path: Path, faulty: FaultyDisk) -> Iterator[Serving]:
    serving = Serving(tmp_path, **SIZES)
    serving.environment = faulty.environment()
    with serving:
        yield serving


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Storing:
    """Prompts that one client has stored, and what is there of them."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.first = self.prompts = 0
        self.connect()

    def connect(self) -> None:
        self.client = self.serving.connect(timeout_s=60)
        self.ns = self.client.open(SPACE)

    def tier(self, name: str) -> Any:
        return self.client.status()["core"]["tiers"][name]

    def nodes(self, prompt: int) -> list[int]:
        return [prompt << 8 | place for place in range(PROMPT)]

    def store(self, prompts: int) -> None:
        for _ in range(prompts):
            nodes = self.nodes(self.prompts)
            result = self.ns.store(nodes, pages_of(nodes, 0, 0, PAGE_BYTES), timeout_s=60)
            assert result.stored == PROMPT, result
            self.prompts += 1

    def restart(self, *, keep_arena: bool = True) -> None:
        self.client.close()
        self.serving.kill()
        if not keep_arena:
            self.serving.lose_arena()
        self.serving.start()
        self.connect()

    def check_catches_up(self) -> None:
        pages = (self.prompts - self.first) * PROMPT

        def caught_up() -> bool:
            nvme = self.tier("nvme")
            return (nvme["health"], nvme["pages"], nvme["queued_records"]) == ("ok", pages, 0)

        eventually(caught_up, f"all {pages} sealed pages are on NVMe")
        assert self.tier("dram")["pages"] == pages
        result = self.client.flush(60)
        assert result.pending == result.not_admitted == 0, result

    def check_all_there(self) -> None:
        for prompt in range(self.first, self.prompts):
            nodes, out = self.nodes(prompt), np.zeros((PROMPT, PAGE_BYTES), np.uint8)
            assert self.ns.load(nodes, out, timeout_s=60) == PROMPT
            check_pages(out, nodes, 0, 0)

    def forget(self) -> None:
        """Room for the next round."""
        self.client.clear(SPACE)
        self.first = self.prompts


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_all_that_is_sealed_reaches_nvme_when_the_disk_is_well_again_and_nobody_stores(
    serving: Serving, faulty: FaultyDisk, pool: ThreadPoolExecutor, rng: random.Random, error: int
) -> None:
    storing = Storing(serving)
    for _ in range(tally.rounds(4) if LONG else 2):
        storing.store(rng.randrange(4))
        before = faulty.struck
        writer = pool.submit(storing.store, rng.randint(4, 10))
        threading.Event().wait(rng.uniform(0, 0.05))  # anywhere in its stores: that is the point
        sync = error if rng.random() < 0.5 else 0
        faulty.set(write=error, sync=sync, every=rng.choice((1, 1, 2, 5)))
        writer.result()
        storing.store(1)
        if faulty.struck == before:  # none of the few calls failed: the next one does
            faulty.set(write=error, sync=sync)
            storing.store(1)
            eventually(
                lambda before=before: faulty.struck > before, "a call of the disk has failed"
            )
        if rng.random() < 0.3:
            storing.restart()  # the next daemon meets the disk as it is
        faulty.heal()
        storing.check_catches_up()
        storing.restart(keep_arena=False)
        storing.check_all_there()
        storing.forget()
        name = errno.errorcode[error]
        tally.count(f"disk failed under stores, then healthy and idle ({name})")
    storing.client.close()

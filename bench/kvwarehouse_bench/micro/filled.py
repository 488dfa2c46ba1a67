"""A private daemon that holds so many small pages, for what grows by the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client import Client, OpenNamespace
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import noise, open_bench, prompt
from kvwarehouse_bench.micro.private import private_daemon

PAGE_BYTES = 512
SLOT_BYTES = 4096
"""What the smallest page takes of an arena."""
CHAIN = 1000
SPARE = 2 * CHAIN
FULL_DRAM_BYTES = 64 << 20
_LEAST_DRAM_BYTES = 32 << 20
_WAIT_S = 60.0


@dataclass(frozen=True)
class Filled:
    daemon: PrivateDaemon
    ns: OpenNamespace
    pages: int
    """That are there: an index that is as full as it may be has no place for some, and what stood
    behind them goes too."""


@contextmanager
def filled_daemon(
    pages: int, *, index_pages: int, chain_pages: int = CHAIN, spare: int = SPARE
) -> Iterator[Filled]:
    """Room for the pages and `spare` more, and the pages in chains, whose prompts are `chain(0)`,
    `chain(1)`, ... An index for twice as many has a place for each."""
    # A fiftieth is kept free, and a chain may be reserved beside what is stored.
    dram = max(_LEAST_DRAM_BYTES, ((pages + spare) * 21 // 20 + CHAIN) * SLOT_BYTES)
    with private_daemon({"dram": dram, "index_pages": index_pages}) as (daemon, client):
        ns = open_bench(client, PAGE_BYTES)
        _fill(ns, pages, chain_pages)
        held = client.status()["core"]["tiers"]["dram"]["pages"]
        check_filled(held, pages if index_pages >= 2 * pages else max(held, pages * 9 // 10))
        yield Filled(daemon, ns, held)


def full_settings() -> dict[str, int]:
    """Of a daemon that is soon full of such pages: its slots are, before its index is."""
    return {"dram": FULL_DRAM_BYTES, "index_pages": 2 * FULL_DRAM_BYTES // SLOT_BYTES}


def is_full(client: Client) -> bool:
    """Whether pages have taken the place of others already."""
    return bool(client.status()["core"]["tiers"]["dram"]["left"].get("evicted", 0))


def chain(number: int, pages: int = CHAIN) -> NDArray[np.uint32]:
    return prompt(pages, seed=number)


def _fill(ns: OpenNamespace, pages: int, chain_pages: int) -> None:
    rows = noise(chain_pages, PAGE_BYTES)
    for number, begin in enumerate(range(0, pages, chain_pages)):
        count = min(chain_pages, pages - begin)
        stored = ns.store(chain(number, count), rows[:count], timeout_s=_WAIT_S)
        check_filled(stored.stored, count)

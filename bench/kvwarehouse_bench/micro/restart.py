"""How soon a daemon serves again: after kill -9 with pages in the arena, alone and beside a million
on NVMe, and after a reboot that left the NVMe tier alone. Small pages, for recovery costs by the
page."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from typing import Any

from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse_bench.harness.alternation import timed
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import Bench, noise, prompt
from kvwarehouse_bench.micro.private import private_daemon

PAGE_BYTES = 4096
ARENA_PAGES = 100_000
NVME_PAGES = 1_000_000
_CHAIN = 1000
_WAIT_S = 120.0


def settings(folder: str | None) -> dict[str, Any]:
    """Of a daemon that holds the pages, with room beside them: in an index near its bound, here and
    there a page takes the place of another. With twice as many places as pages that still came to
    one fill of a million in twenty."""
    dram = 2 * ARENA_PAGES * PAGE_BYTES
    if folder is None:
        return {"dram": dram, "index_pages": 2 * ARENA_PAGES}
    # A record is a header of 4 KiB and the page; reclaim keeps segments free.
    capacity = 2 * NVME_PAGES * 2 * PAGE_BYTES
    return {"dram": dram, "nvme_capacity": capacity, "index_pages": 4 * NVME_PAGES}


def measure(bench: Bench) -> list[Figure]:
    if bench.daemon is None:
        raise UsageError("restart measures a private daemon only", code="bad_bench")
    if bench.folder is None:
        return _with_arena(bench, bench.daemon)
    with private_daemon(settings(None)) as (daemon, client):
        alone = _with_arena(Bench(bench.options, client, daemon, None), daemon)
    return [*alone, *_with_nvme(bench, bench.daemon)]


def _with_arena(bench: Bench, daemon: PrivateDaemon) -> list[Figure]:
    empty = _starts(bench, daemon, lambda: None)
    _fill(bench, ARENA_PAGES)
    killed = _starts(bench, daemon, lambda: None)
    check_filled(_in(bench, "dram"), ARENA_PAGES)
    return _figures(f"kill -9, {ARENA_PAGES:,} pages in the arena", "1 s", killed, empty)


def _with_nvme(bench: Bench, daemon: PrivateDaemon) -> list[Figure]:
    empty = _starts(bench, daemon, lambda: None)
    _fill(bench, NVME_PAGES)
    killed = _starts(bench, daemon, lambda: None)
    both = f"{_in(bench, 'dram'):,} pages in the arena and {NVME_PAGES:,} on nvme"
    check_filled(_in(bench, "nvme"), NVME_PAGES)
    lost = _starts(bench, daemon, lambda: shutil.rmtree(daemon.arena_dir))
    return [
        *_figures(f"kill -9, {both}", "3 s", killed, empty),
        *_figures(f"arena lost, {NVME_PAGES:,} pages on nvme", "3 s", lost, empty),
    ]


def _fill(bench: Bench, pages: int) -> None:
    ns = bench.open(PAGE_BYTES)
    rows = noise(_CHAIN, PAGE_BYTES)
    for begin in range(0, pages, _CHAIN):
        stored = ns.store(prompt(_CHAIN, seed=begin), rows, timeout_s=_WAIT_S)
        check_filled(stored.stored, _CHAIN)
        if bench.folder and begin // _CHAIN % 50 == 49 and bench.client.flush(_WAIT_S).pending:
            raise CapacityError(
                f"pages were not durable within {_WAIT_S:.0f} s: the disk of --nvme-dir is too"
                " slow for this measure",
                code="bench_room",
            )


def _starts(bench: Bench, daemon: PrivateDaemon, lose: Callable[[], None]) -> tuple[float, float]:
    """Medians of a start after SIGKILL: seconds until it serves, and those of recovery in them."""
    serving, recovering = [], []
    for _ in range(bench.options.rounds):
        if bench.folder:
            bench.client.flush(_WAIT_S)
        daemon.kill()
        lose()
        serving.append(timed(daemon.start))
        recovering.append(float(bench.client.status()["core"]["recovery"]["seconds"]))
    return statistics.median(serving), statistics.median(recovering)


def _figures(
    what: str, goal: str, ours: tuple[float, float], empty: tuple[float, float]
) -> list[Figure]:
    serving, recovering = ours
    return [
        Figure(
            name=f"{what}: until it serves",
            value=serving,
            unit="s",
            limit=empty[0],
            limit_name="a start with nothing stored",
            goal=f"under {goal}",
        ),
        Figure(name=f"{what}: recovery alone", value=recovering, unit="s", goal=f"under {goal}"),
    ]


def _in(bench: Bench, tier: str) -> int:
    return int(bench.client.status()["core"]["tiers"][tier]["pages"])

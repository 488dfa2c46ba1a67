"""Writes until they are durable, and loads of pages that are only on NVMe, against fio."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np

from kvwarehouse.cli.bench.figures import GIGABYTE, Figure
from kvwarehouse.cli.bench.fio import DEPTH, Disk
from kvwarehouse.cli.bench.load import check_filled
from kvwarehouse.cli.bench.options import Bench, noise, prompt
from kvwarehouse.cli.bench.rounds import Rounds, alternate, timed
from kvwarehouse.client import OpenNamespace
from kvwarehouse.errors import CapacityError, UsageError

_WAIT_S = 120.0


def measure(bench: Bench) -> list[Figure]:
    if bench.folder is None:
        raise UsageError("nvme needs --nvme-dir and a private daemon", code="bad_bench")
    options = bench.options
    disk = Disk(bench.folder, options.moved_bytes, options.page_bytes)
    ns = bench.open(options.page_bytes)
    measured = [
        ("write to nvme, durable", "write", _writes(bench, ns)),
        ("load from nvme, verified", "read", loads_from_nvme(bench, ns)),
    ]
    return [_compared(bench, disk, *each) for each in measured]


def _compared(
    bench: Bench, disk: Disk, name: str, direction: str, ours: Callable[[], float]
) -> Figure:
    rounds, moved = bench.options.rounds, bench.options.moved_bytes
    if not disk.measurable():
        ours()
        alone = Rounds([ours() for _ in range(rounds)], [])
        return Figure(
            name, moved / alone.ours_s / GIGABYTE, "GB/s", limit_name="fio is not installed"
        )
    if direction == "read":
        disk.seconds("write")  # the file to read
    both = alternate(rounds, ours, lambda: disk.seconds(direction))
    return Figure(
        name=name,
        value=moved / both.ours_s / GIGABYTE,
        unit="GB/s",
        limit=moved / both.limit_s / GIGABYTE,
        limit_name=f"fio, same blocks, depth {DEPTH}",
        goal="ratio 0.8 or more",
        ratio_of_rounds=both.speed_ratio,
    )


def _writes(bench: Bench, ns: OpenNamespace) -> Callable[[], float]:
    """Stores are in DRAM when the clock starts on what the disk has to do: the flush of them. The
    store is counted too, since writing begins with the first sealed page."""
    options = bench.options
    pages = noise(options.pages, options.page_bytes)
    seeds = count(1)

    def ours() -> float:
        bench.client.clear(ns.space)
        tokens = prompt(options.pages, seed=next(seeds))

        def write() -> None:
            ns.store(tokens, pages, timeout_s=_WAIT_S)
            flushed = bench.client.flush(_WAIT_S)
            if flushed.pending:
                raise CapacityError(
                    f"{flushed.pending} pages were not durable within {_WAIT_S:.0f} s; use a"
                    " smaller --bytes",
                    code="bench_room",
                )

        taken = timed(write)
        bench.client.evict(ns.space, options.pages, "dram")
        check_filled(ns.lookup(tokens).by_tier["nvme"], options.pages)
        return taken

    return ours


def loads_from_nvme(bench: Bench, ns: OpenNamespace) -> Callable[[], float]:
    """Seconds of loading a round's pages, all of them on NVMe alone."""
    options = bench.options
    pages, tokens = noise(options.pages, options.page_bytes), prompt(options.pages, seed=0)
    out = np.ones_like(pages)
    stored = False

    def ours() -> float:
        nonlocal stored
        if not stored:
            bench.client.clear(ns.space)
            ns.store(tokens, pages, timeout_s=_WAIT_S)
            bench.client.flush(_WAIT_S)
            stored = True
        bench.client.evict(ns.space, options.pages, "dram")
        check_filled(ns.lookup(tokens).by_tier["nvme"], options.pages)
        filled = 0

        def load() -> None:
            nonlocal filled
            filled = ns.load(tokens, out, timeout_s=_WAIT_S)

        taken = timed(load)
        check_filled(filled, options.pages)
        return taken

    return ours

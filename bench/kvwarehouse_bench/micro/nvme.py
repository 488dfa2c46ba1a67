"""Writes until they are durable, and loads of pages that are only on NVMe, against fio: rates, what
they take of the processor, and when the first page of a load is usable.

Alike on both sides: direct I/O, blocks, depth and engine, memory that is there, and a sync behind
all writes. The tier is full before the rounds begin, because a file that was written before takes
writes faster than a new one; fio's file is as large and as full, and each of its writes takes the
next part. Not alike, and in fio's favour: it moves everything through the memory of `depth` blocks,
again and again, which caches may hold; the tier moves each page to or from memory of its own.

The processor's time of loads is that of the core's threads less what they took to digest, because
fio digests nothing. The core counts that where it happens (`read_digest_s` of the status; of pages
below 8 MiB, one in each 8 MiB stands for the others): the thread's own time, without what others
took of the processor meanwhile, but with interrupts that came meanwhile, such as those of the disk.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvwarehouse.client import OpenNamespace, connect
from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.harness.alternation import Rounds, alternate, timed
from kvwarehouse_bench.micro.figures import GIGABYTE, Figure
from kvwarehouse_bench.micro.fio import Disk, Pass
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import PAGE_TOKENS, Bench, noise, prompt
from kvwarehouse_bench.micro.process import core_s

_WAIT_S = 120.0


@dataclass
class _Passes:
    """One side of a comparison: seconds by the clock for `alternate`, and the processor's kept."""

    run: Callable[[], Pass]
    processor_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        done = self.run()
        self.processor_s.append(done.processor_s)
        return done.seconds

    @property
    def median_processor_s(self) -> float:
        return statistics.median(self.processor_s[1:])  # the first warmed up


def measure(bench: Bench) -> list[Figure]:
    if bench.folder is None or bench.daemon is None:
        raise UsageError("nvme needs --nvme-dir and a private daemon", code="bad_bench")
    options = bench.options
    size = format_size(options.page_bytes)
    tier = bench.client.status()["core"]["tiers"]["nvme"]
    disk = Disk(
        bench.folder,
        options.nvme_bytes,
        options.moved_bytes,
        options.page_bytes,
        tier["io_engine"],
    )
    if disk.measurable():
        disk.fill()
    ns = bench.open(options.page_bytes)
    store = _writes(bench, ns)
    for _ in range(-(-options.nvme_bytes // options.moved_bytes)):
        store()
    load = loads_from_nvme(bench, ns)
    return [
        *_compared(bench, disk, f"write to nvme, durable, {size}", "write", store),
        *_compared(bench, disk, f"load from nvme, {size}", "read", load),
        _first_page(bench, ns, f"first page of a load, {size}"),
    ]


def _compared(
    bench: Bench,
    disk: Disk,
    name: str,
    direction: str,
    ours: Callable[[], Pass],
) -> list[Figure]:
    rounds, moved = bench.options.rounds, bench.options.moved_bytes
    mine = _Passes(ours)
    if not disk.measurable():
        mine()
        alone = Rounds([mine() for _ in range(rounds)], [])
        return [
            Figure(name, moved / alone.ours_s / GIGABYTE, "GB/s", limit_name="fio is not installed")
        ]
    fio = _Passes(lambda: disk.run(direction))
    both = alternate(rounds, mine, fio)
    return [
        Figure(
            name=name,
            value=moved / both.ours_s / GIGABYTE,
            unit="GB/s",
            limit=moved / both.limit_s / GIGABYTE,
            limit_name=disk.name,
            goal="rounds reach ratio 0.9",
            ratio_of_rounds=both.speed_ratio,
            ratio_spread=both.speed_ratio_spread,
        ),
        Figure(
            name=f"processor, {name}",
            value=mine.median_processor_s / moved * GIGABYTE * 1000,
            unit="ms a GB",
            limit=fio.median_processor_s / moved * GIGABYTE * 1000,
            limit_name="fio's job; ours without digests",
            # A job that was too short for its clock is no limit to be judged by.
            goal="ratio 1.3 or less" if fio.median_processor_s > 0 else "",
        ),
    ]


def of_core(bench: Bench, call: Callable[[], object]) -> Pass:
    """What the daemon's core takes of the processor during the call, and not for what is cleared
    and evicted before it."""
    pid = bench.daemon.pid if bench.daemon else 0
    spent_s = core_s(pid)
    seconds = timed(call)
    return Pass(seconds, core_s(pid) - spent_s)


def without_digests(bench: Bench, call: Callable[[], Pass]) -> Pass:
    """The same less what the core took to digest what it read, which it counts itself: there is
    nothing of the kind in fio."""

    def digests_s() -> float:
        counted: float = bench.client.status()["core"]["tiers"]["nvme"]["read_digest_s"]
        return counted

    before_s = digests_s()
    done = call()
    return Pass(done.seconds, max(done.processor_s - (digests_s() - before_s), 0.0))


def _first_page(bench: Bench, ns: OpenNamespace, name: str) -> Figure:
    """Seconds until a client has the first page of a batch that another one loads, against the
    whole batch of the same rounds."""
    options = bench.options
    assert bench.daemon is not None
    load = loads_from_nvme(bench, ns)
    first_s: list[float] = []
    row = np.ones((1, options.page_bytes), np.uint8)
    with connect(bench.daemon.address) as client, ThreadPoolExecutor(1) as beside:
        watching = client.open(ns.space)
        tokens = prompt(options.pages, seed=0)[:PAGE_TOKENS]

        def beside_it() -> float:
            taken = timed(lambda: watching.load(tokens, row, timeout_s=_WAIT_S))
            check_filled(watching.lookup(tokens).by_tier["dram"], 1)
            return taken

        def both() -> float:
            watched: list[Future[float]] = []
            whole = load(lambda: watched.append(beside.submit(beside_it)))
            first_s.append(watched[0].result())
            return whole.seconds

        both()
        whole_s = [both() for _ in range(options.rounds)]
    rounds = Rounds(whole_s, first_s[1:])
    return Figure(
        name=name,
        value=rounds.limit_s * 1000,
        unit="ms",
        limit=rounds.ours_s * 1000,
        limit_name=f"all {options.pages} of them",
        goal="ratio 0.2 or less",
        ratio_of_rounds=rounds.speed_ratio,
        ratio_spread=rounds.speed_ratio_spread,
    )


def _writes(bench: Bench, ns: OpenNamespace) -> Callable[[], Pass]:
    """Stores are in DRAM when the clock starts on what the disk has to do: the flush of them. The
    store is counted too, since writing begins with the first sealed page."""
    options = bench.options
    pages = noise(options.pages, options.page_bytes)
    seeds = count(1)

    def ours() -> Pass:
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

        taken = of_core(bench, write)
        bench.client.evict(ns.space, options.pages, "dram")
        check_filled(ns.lookup(tokens).by_tier["nvme"], options.pages)
        return taken

    return ours


def loads_from_nvme(bench: Bench, ns: OpenNamespace) -> Callable[..., Pass]:
    """What it takes to load a round's pages, all of them on NVMe alone. The call is given what is
    to be begun beside the load, just before it."""
    options = bench.options
    pages, tokens = noise(options.pages, options.page_bytes), prompt(options.pages, seed=0)
    out = np.ones_like(pages)
    stored = False

    def ours(begin: Callable[[], object] = lambda: None) -> Pass:
        nonlocal stored
        if not stored:
            bench.client.clear(ns.space)
            ns.store(tokens, pages, timeout_s=_WAIT_S)
            bench.client.flush(_WAIT_S)
            stored = True
        bench.client.evict(ns.space, options.pages, "dram")
        check_filled(ns.lookup(tokens).by_tier["nvme"], options.pages)
        begin()
        filled = 0

        def load() -> None:
            nonlocal filled
            filled = ns.load(tokens, out, timeout_s=_WAIT_S)

        taken = without_digests(bench, lambda: of_core(bench, load))
        check_filled(filled, options.pages)
        return taken

    return ours

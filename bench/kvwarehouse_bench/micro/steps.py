"""The longest that the core's one thread is busy with one thing, as another client meets it: its
longest wait for a store, of one small page again and again, while an operator or a damaged page
gives the daemon work over many pages. A private daemon with --pages tiny pages. Each kind of work
is done once; what the machine itself adds is in the first row, where nothing is done."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Final

import numpy as np

from kvwarehouse.client import Client, OpenNamespace, connect
from kvwarehouse.errors import StorageError
from kvwarehouse.types import KeyRun, Namespace
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.filled import CHAIN, PAGE_BYTES, Filled, chain, filled_daemon
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import PAGE_TOKENS, Options, noise

_PINS = 96 << 10  # what one process may, of its half, beside sessions of its own
_SESSIONS = 4
_CALLS = 20
_EVICTED = 1000
_EVICTED_MOST = 100_000
"""Of one call."""
_WAIT_S = 60.0
_STORED_AT_ONCE = 512
_PARENT = b"parent"

# Stores until a line comes, then says the longest that one took since the last, in seconds.
_NEIGHBOUR: Final = """
import select, sys, time
import numpy as np
import kvwarehouse as kvw

space = kvw.Namespace(
    model="kvwarehouse-bench", weights="neighbour", dtype="uint8", layout="bench/1",
    page_tokens=1, page_bytes=512,
)
with kvw.connect(sys.argv[1]) as client:
    opened, row = client.open(space), np.zeros((1, 512), np.uint8)
    opened.store(keys=[b"page"], pages=row)
    print("ready", flush=True)
    longest = 0.0
    while True:
        start = time.perf_counter()
        opened.store(keys=[b"page"], pages=row, timeout_s=60)
        longest = max(longest, time.perf_counter() - start)
        if select.select([sys.stdin], [], [], 0.0005)[0]:
            if not sys.stdin.readline():
                break
            print(longest, flush=True)
            longest = 0.0
"""


def measure(options: Options) -> list[Figure]:
    pages = options.sizes.stepped
    orphans = max(pages // 10, 1)
    with (
        filled_daemon(pages, index_pages=4 * pages, spare=2 * orphans) as filled,
        connect(filled.daemon.address) as client,
        _neighbour(filled.daemon.address) as longest,
    ):
        space = filled.ns.space
        work: dict[str, Callable[[], object]] = {
            "nothing, for a second": lambda: time.sleep(1.0),
            f"status, {_CALLS} times": lambda: [client.status() for _ in range(_CALLS)],
            f"list of {pages:,} pages": lambda: sum(1 for _ in client.pages(space)),
            "evict 1": lambda: client.evict(space, 1),
        }
        found = [_figure(name, each, longest) for name, each in work.items()]
        found += _pinned(filled, client, longest)
        found += _damaged(filled, client, longest, orphans)
        found.append(_figure("evict half", lambda: _evict_half(client, filled), longest))
        found.append(_figure("clear of the other half", lambda: client.clear(space), longest))
    return found


def _figure(name: str, work: Callable[[], object], longest: Callable[[], float]) -> Figure:
    longest()
    work()
    return Figure(f"{name}: longest wait of another's store", longest() * 1e3, "ms")


def _pinned(filled: Filled, client: Client, longest: Callable[[], float]) -> list[Figure]:
    """Several sessions, as none may pin that much."""
    chains = max(min(_PINS, filled.pages // 8) // _SESSIONS // CHAIN, 1)
    with ExitStack() as stack:
        held: list[int] = []

        def pin() -> None:
            for session in range(_SESSIONS):
                mine = stack.enter_context(connect(filled.daemon.address)).open(filled.ns.space)
                for number in range(session * chains, (session + 1) * chains):
                    if number * CHAIN >= filled.pages:
                        break
                    pins = mine.pin(chain(number))
                    stack.callback(pins.release)
                    held.append(pins.pages)

        taken = _figure("pins, being taken", pin, longest)
        evicted = _figure(
            f"evict {_EVICTED:,} beside {sum(held):,} pins",
            lambda: client.evict(filled.ns.space, _EVICTED),
            longest,
        )
    return [taken, evicted]


def _damaged(
    filled: Filled, client: Client, longest: Callable[[], float], orphans: int
) -> list[Figure]:
    """A page whose children are many is found damaged, and they leave behind it."""
    ns = client.open(
        Namespace(
            model="kvwarehouse-bench",
            weights="shared",
            dtype="uint8",
            layout="bench/1",
            page_tokens=PAGE_TOKENS,
            page_bytes=PAGE_BYTES,
        )
    )
    shared = np.random.default_rng(11).integers(0, 256, (1, PAGE_BYTES), dtype=np.uint8)
    check_filled(ns.store(keys=[_PARENT], pages=shared).stored, 1)
    _store_children(ns, orphans)
    _flip(filled, client, shared.tobytes())

    def load() -> None:
        if int(ns.load(keys=[_PARENT], out=np.zeros_like(shared))) != 0:
            raise StorageError("the page that was damaged was loaded", code="bench")
        while client.status()["core"]["quarantined"] == 0:
            time.sleep(0.01)

    def sweep() -> None:
        client.sweep()
        while client.status()["core"]["orphan_pages"] > 0:
            time.sleep(0.05)

    return [
        _figure(f"quarantine of a page with {orphans:,} children", load, longest),
        _figure(f"sweep of its {orphans:,} orphans", sweep, longest),
    ]


def _store_children(ns: OpenNamespace, children: int) -> None:
    rows = noise(_STORED_AT_ONCE, PAGE_BYTES)
    keys = (b"child%d" % number for number in count())
    for begin in range(0, children, _STORED_AT_ONCE):
        some = min(_STORED_AT_ONCE, children - begin)
        runs = [KeyRun([next(keys)], position=1, parent=_PARENT) for _ in range(some)]
        check_filled(ns.store(keys=runs, pages=rows[:some], timeout_s=_WAIT_S).stored, some)


def _flip(filled: Filled, client: Client, page: bytes) -> None:
    """A bit of the page, where it lies in the arena."""
    arena_bytes = int(client.status()["core"]["tiers"]["dram"]["capacity_bytes"])
    with (
        (filled.daemon.arena_dir / "arena").open("r+b") as file,
        mmap.mmap(file.fileno(), arena_bytes) as arena,
    ):
        at = arena.find(page)
        if at < 0:
            raise StorageError("the arena lacks a page that was stored", code="bench")
        arena[at] ^= 1


def _evict_half(client: Client, filled: Filled) -> None:
    for _ in range(0, filled.pages // 2, _EVICTED_MOST):
        client.evict(filled.ns.space, min(_EVICTED_MOST, filled.pages // 2))


@contextmanager
def _neighbour(address: str) -> Iterator[Callable[[], float]]:
    """Another client, in a process of its own. What is called returns its longest wait for a store
    since the last call, in seconds."""
    command = [sys.executable, "-P", "-c", _NEIGHBOUR, address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said, asked = process.stdout, process.stdin

        def longest() -> float:
            asked.write("\n")
            asked.flush()
            return float(said.readline())

        said.readline()
        try:
            yield longest
        finally:
            process.kill()

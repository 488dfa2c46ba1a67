"""What the places of memory gain: huge pages under the arena, mapping it ahead of the first load,
where slots begin, and how many nodes there are to choose from."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvwarehouse.client import OpenNamespace, connect
from kvwarehouse.client.regions import Regions
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse.errors import UsageError
from kvwarehouse_bench.harness.alternation import alternate, timed
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import Options, noise, open_bench, prompt
from kvwarehouse_bench.micro.private import private_daemon
from kvwarehouse_bench.micro.process import huge_bytes

_POPULATE_READ = 22  # MADV_POPULATE_READ of linux/mman.h; Python has no name for it
_SET_THP_DISABLE, _GET_THP_DISABLE = 41, 42  # PR_SET_THP_DISABLE and its twin of linux/prctl.h
_KERNEL_PAGE_BYTES = 4096
_PIECES = 1024
_STRIDE_BYTES = 256 << 10
_NODES = Path("/sys/devices/system/node")


def measure(options: Options) -> list[Figure]:
    with ExitStack() as stack:
        huge = stack.enter_context(_arena(options, nullcontext()))
        small = stack.enter_context(_arena(options, _small_pages()))
        found = [_mapping(options, small), _slot_places(options), *_huge(options, small, huge)]
    return [*found, Figure("memory nodes of this machine", _nodes(), "nodes")]


@contextmanager
def _small_pages() -> Iterator[None]:
    """A process that is started meanwhile gets no transparent huge pages, whatever it asks for."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = prctl(_GET_THP_DISABLE, 0, 0, 0, 0)
    if before < 0 or prctl(_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        why = os.strerror(ctypes.get_errno())
        raise UsageError(f"this kernel has no switch for huge pages: {why}", code="bad_bench")
    try:
        yield
    finally:
        prctl(_SET_THP_DISABLE, before, 0, 0, 0)


@dataclass(frozen=True)
class _Arena:
    daemon: PrivateDaemon
    ns: OpenNamespace
    tokens: Any
    out: Any
    start_s: float
    """Until the daemon serves and has taken its memory."""


@contextmanager
def _arena(options: Options, started_in: AbstractContextManager[None]) -> Iterator[_Arena]:
    """A daemon with a round's pages in its arena."""
    with ExitStack() as stack:
        # No block of its own for the time of the start: `with` is what is timed.
        begun: list[tuple[PrivateDaemon, Any]] = []
        settings = {"dram": options.dram_bytes}
        with started_in:
            start_s = timed(lambda: begun.append(stack.enter_context(private_daemon(settings))))
        daemon, client = begun[0]
        ns = open_bench(client, options.page_bytes)
        rows, tokens = noise(options.pages, options.page_bytes), prompt(options.pages, seed=1)
        ns.store(tokens, rows, timeout_s=60)
        check_filled(ns.lookup(tokens).pages, options.pages)
        yield _Arena(daemon, ns, tokens, np.ones_like(rows), start_s)


def _huge(options: Options, small: _Arena, huge: _Arena) -> list[Figure]:
    def first_load(arena: _Arena) -> float:
        """By a client that has not met the arena yet."""
        with connect(arena.daemon.address) as client:
            return _load(arena, client.open(arena.ns.space))

    warm = alternate(options.rounds, lambda: _load(huge, huge.ns), lambda: _load(small, small.ns))
    first = alternate(options.rounds, lambda: first_load(huge), lambda: first_load(small))
    mapped = _in_huge_pages(huge)
    limit = "the same on small pages"
    return [
        Figure(
            "arena in huge pages", 100 * mapped / options.dram_bytes, "% of it",
            limit=100 * _in_huge_pages(small)
            / options.dram_bytes, limit_name="of a daemon that gets none",
        ),
        Figure(
            "start until memory is taken, huge pages", huge.start_s, "s",
            limit=small.start_s, limit_name=limit,
        ),
        Figure.of_speed("first load of a client, huge pages", options.moved_bytes, first, limit),
        Figure.of_speed("further loads, huge pages", options.moved_bytes, warm, limit),
    ]  # fmt: skip


def _in_huge_pages(arena: _Arena) -> int:
    return huge_bytes(arena.daemon.pid, str(arena.daemon.arena_dir / "arena"))


def _load(arena: _Arena, ns: OpenNamespace) -> float:
    filled = 0

    def call() -> None:
        nonlocal filled
        filled = ns.load(arena.tokens, arena.out)

    taken = timed(call)
    check_filled(filled, len(arena.out))
    return taken


def _mapping(options: Options, arena: _Arena) -> Figure:
    """What a client's first load pays for memory that is taken but not mapped by it, 2 MiB at a
    time as it does, and one small page at a time as it would otherwise."""
    path = arena.daemon.arena_dir / "arena"
    size = options.moved_bytes

    def touched(ahead: bool) -> float:
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:

            def touch() -> None:
                if ahead:
                    mapped.madvise(_POPULATE_READ)
                view = np.frombuffer(mapped, np.uint8)
                view[::_KERNEL_PAGE_BYTES].max()

            return timed(touch)

    rounds = alternate(options.rounds, lambda: touched(True), lambda: touched(False))
    return Figure.of_speed("arena mapped ahead of the first read", size, rounds, "fault by fault")


def _slot_places(options: Options) -> Figure:
    """Blocks that all begin at a multiple of a power of two meet in few sets of a cache; the same
    blocks, each begun a block further on, do not."""
    memory: Any = np.ones(_PIECES * (_STRIDE_BYTES + _KERNEL_PAGE_BYTES), np.uint8)
    out: Any = np.ones((_PIECES, _KERNEL_PAGE_BYTES), np.uint8)

    def gathered(stride: int) -> float:
        blocks = Regions.strided(
            owners=[memory],
            bases=[memory.ctypes.data],
            strides=[stride],
            piece_bytes=[_KERNEL_PAGE_BYTES],
            blocks=np.arange(_PIECES, dtype=np.int64).reshape(-1, 1),
        )
        return timed(lambda: blocks.gather(out))

    rounds = alternate(
        options.rounds,
        lambda: gathered(_STRIDE_BYTES + _KERNEL_PAGE_BYTES),
        lambda: gathered(_STRIDE_BYTES),
    )
    return Figure.of_speed("slots of all colours", out.nbytes, rounds, "slots of one colour")


def _nodes() -> int:
    """1 where the kernel does not say."""
    return max(1, len(list(_NODES.glob("node[0-9]*"))))

"""Loads from a remote store and puts into it, against obstore alone on the same store with as many
calls at a time; and lookups of what is in the store, and the memory of the filter that says so.

Alike on both sides of loads and puts: the store, its deadlines, the number of objects and the bytes
of each, which include the header of each page: obstore reads the objects that the tier has put, and
puts as many of the same sizes. Rates are those of KV. Not alike, and in obstore's favour: it leaves
the bytes where it got them, and takes one buffer for all that it puts. The tier verifies, digests
and copies each page into DRAM, in a process beside the daemon that gives way to engines, and from
there to the client; and packs, digests and puts from DRAM.

Prompts are whole objects: of an incomplete one nothing is put.
"""

from __future__ import annotations

from itertools import count

import numpy as np

from kvwarehouse.errors import WarehouseError
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.harness.alternation import Rounds, alternate
from kvwarehouse_bench.micro.figures import Curve, Figure
from kvwarehouse_bench.micro.load import by_page_size
from kvwarehouse_bench.micro.options import Options, noise, prompt
from kvwarehouse_bench.micro.remote_host import RemoteHost, capacity_bytes, remote_host
from kvwarehouse_bench.micro.remote_lookup import lookups
from kvwarehouse_bench.micro.remote_store import BenchStore, ObstoreAlone, bench_store

LOADS, PUTS = "loads", "puts"
RUN_PAGES = 16
"""Of a prompt, a multiple: pages of PAGE_TOKENS tokens are in objects of 16, or of fewer where
they are large (native/remote/object.h)."""

_GOAL = "rounds reach ratio 0.8"
_UNDER_WAY_BYTES = 128 << 20
_UNDER_WAY_SHARE = 10
"""Loads have _UNDER_WAY_BYTES on their way at most, and an eighth of the arena: it is as large as
not to be what bounds them."""
_HEADER_BYTES = 4096
"""Of a page in an object."""


def measure(options: Options) -> list[Figure | Curve]:
    figures: list[Figure] = []
    found: dict[int, dict[tuple[str, str], Rounds]] = {}
    for page_bytes in options.sizes.remote_page_bytes:
        pages = pages_of(options, page_bytes)
        moved_bytes, size = pages * page_bytes, format_size(page_bytes)
        with bench_store(options, room_bytes(moved_bytes, page_bytes)) as made:
            loads, puts = _of_size(options, made, page_bytes, pages)
        found[page_bytes] = {(LOADS, ""): loads, (PUTS, ""): puts}
        gets, at_once = made.config.gets, made.config.puts
        figures += [
            Figure.of_speed(
                f"load from a remote store, pages of {size}", moved_bytes, loads,
                f"obstore alone, {gets} gets at a time", _GOAL,
            ),
            Figure.of_speed(
                f"put into a remote store, pages of {size}", moved_bytes, puts,
                f"obstore alone, {at_once} puts at a time", _GOAL,
            ),
        ]  # fmt: skip
    curves = by_page_size("remote store, beside obstore alone", found)
    return [*figures, *lookups(options), *curves]


def pages_of(options: Options, page_bytes: int) -> int:
    """As many bytes a round, in whole objects."""
    return -(-options.pages_of(page_bytes) // RUN_PAGES) * RUN_PAGES


def room_bytes(moved_bytes: int, page_bytes: int) -> int:
    """Of the store's folder and the arena: what a round has put and obstore's own at once."""
    objects = moved_bytes + moved_bytes // page_bytes * _HEADER_BYTES
    return 2 * objects + _dram_bytes(moved_bytes)


def _dram_bytes(moved_bytes: int) -> int:
    bounded = _UNDER_WAY_SHARE * min(moved_bytes, _UNDER_WAY_BYTES)
    return max(3 * moved_bytes, bounded, 128 << 20)


def _of_size(
    options: Options, made: BenchStore, page_bytes: int, pages: int
) -> tuple[Rounds, Rounds]:
    """Loads and puts."""
    moved_bytes = pages * page_bytes
    settings = {
        "dram": _dram_bytes(moved_bytes),
        "remote_write": "all",
        "remote_capacity": capacity_bytes((options.rounds + 2) * 2 * moved_bytes),
    }
    with remote_host(made, settings) as host:
        run = _Run(host, made, page_bytes, pages)
        with ObstoreAlone(made, [each.size_bytes for each in run.objects]) as alone:
            loads = alternate(options.rounds, run.load, lambda: alone.get(run.objects))
            run.check()
            made.remove(run.objects)
            return loads, alternate(options.rounds, run.put, alone.put)


class _Run:
    """The warehouse's rounds. `objects`: of the prompt that it loads."""

    def __init__(self, host: RemoteHost, made: BenchStore, page_bytes: int, pages: int) -> None:
        self._host, self._made, self._ns = host, made, host.open(page_bytes)
        self._pages = noise(pages, page_bytes)
        self._out = np.ones_like(self._pages)
        self._seeds = count(1)
        self._tokens = prompt(pages, seed=0)
        self._host.put(self._ns, self._tokens, self._pages)
        self.objects = made.objects(self._ns.space.id)

    def load(self) -> float:
        return self._host.load(self._ns, self._tokens, self._out)

    def check(self) -> None:
        """What was loaded is what was stored."""
        if not np.array_equal(self._out, self._pages):
            raise WarehouseError("a load from the store gave other pages", code="bench")

    def put(self) -> float:
        """Of another prompt each time, since what the store has is not put again. They are gone
        afterwards."""
        self._host.empty()
        tokens = prompt(len(self._pages), seed=next(self._seeds))
        taken = self._host.put(self._ns, tokens, self._pages)
        found = self._made.objects(self._ns.space.id)
        sizes = sorted(each.size_bytes for each in found)
        if sizes != sorted(each.size_bytes for each in self.objects):
            raise WarehouseError(
                f"the store has {len(found)} objects of {len(self.objects)} that were put, or of"
                " other sizes",
                code="bench",
            )
        self._made.remove(found)
        return taken

"""vLLM's CPU tier and the manager over it, as far as a secondary tier sees them.

Every job must be reported exactly once; rows of a load that was reported are noted, and may not
change after (`assert_untouched`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_connectors.vllm_tier.chunks import RowGroup, Rows
from kvwarehouse_connectors.vllm_tier.jobs import JobOutcome
from kvwarehouse_connectors.vllm_tier.settings import read_settings
from kvwarehouse_connectors.vllm_tier.tier_core import LookupAnswer, RequestFacts, TierCore

ROW_BYTES = 16384
ROWS = 256
EXTENTS = {0: ((0, 16384),), 1: ((0, 4096), (8192, 2048))}
"""Of a group that uses its rows whole, and of one with fewer layers."""
UNTOUCHED = 0xEE
FACTS = RequestFacts()

Bytes = NDArray[np.uint8]


def key(*name: object, group: int = 0) -> bytes:
    """As vLLM makes them: a digest, and the group."""
    return hashlib.sha256(repr(name).encode()).digest() + group.to_bytes(4, "big")


def keys(*name: object, count: int = 4, group: int = 0) -> list[bytes]:
    return [key(*name, number, group=group) for number in range(count)]


def groups(**fields: object) -> dict[int, RowGroup]:
    """fields: of the namespaces."""
    made = {}
    for number, extents in EXTENTS.items():
        space = kvw.Namespace(
            **{  # type: ignore[arg-type]
                "model": "tiny",
                "weights": "w",
                "dtype": "float32",
                "layout": "vllm-tier/1",
                "page_tokens": 16,
                "page_bytes": sum(size for _, size in extents),
                "cache_group": str(number),
                **fields,
            }
        )
        made[number] = RowGroup(space, extents)
    return made


class Primary:
    """settings: the tier's, without their prefix. Owns its core. step: that is being made; the
    weights are known to be right up to `known`."""

    step = known = 0

    def __init__(self, address: str, *, salt: str = "", **settings: object) -> None:
        given = {"address": address, **settings}
        chosen = read_settings({f"kvwarehouse.{name}": value for name, value in given.items()})
        self.rows: Bytes = np.full((ROWS, ROW_BYTES), UNTOUCHED, np.uint8)
        self.core = TierCore(chosen, Rows(self.rows.ctypes.data, ROW_BYTES))
        self.groups = groups(salt=salt)
        self.core.serve(self.groups)
        self._numbers = itertools.count()
        self._open: dict[int, list[int]] = {}
        self.reported: dict[int, JobOutcome] = {}
        self._settled: dict[int, bytes] = {}

    def connected(self) -> Primary:
        """Waits until the daemon knows the namespaces."""
        found = self.core._connection.namespace
        eventually(lambda: all(found(g.space) for g in self.groups.values()), "the namespaces")
        return self

    # -- rows --------------------------------------------------------------------------------------

    def fill(self, rows: Sequence[int], seed: int = 0) -> list[bytes]:
        """Noise, the same for the same seed."""
        rng = np.random.default_rng(seed)
        for row in rows:
            self.rows[row] = rng.integers(0, 256, ROW_BYTES, np.uint8)
        return self.contents(rows)

    def contents(self, rows: Sequence[int], group: int = 0) -> list[bytes]:
        """Of a group's chunks, which have these rows."""
        return [
            b"".join(
                self.rows[row, offset : offset + size].tobytes() for offset, size in EXTENTS[group]
            )
            for row in rows
        ]

    # -- a request ---------------------------------------------------------------------------------

    def lookup(self, request: str, named: Sequence[bytes]) -> list[LookupAnswer]:
        return [self.core.lookup(request, one) for one in named]

    def found(self, request: str, named: Sequence[bytes]) -> list[bool]:
        """As vLLM asks: again in each step, until it is known of all."""

        def known() -> list[LookupAnswer] | None:
            self.core.finished()
            answers = self.lookup(request, named)
            self.core.step_ends()
            return None if LookupAnswer.COMING in answers else answers

        return [one is LookupAnswer.HIT for one in eventually(known, "an end of asking again")]

    # -- jobs --------------------------------------------------------------------------------------

    def begin_load(self, request: str, named: Sequence[bytes], rows: Sequence[int]) -> int:
        number = next(self._numbers)
        self._open[number] = list(rows)
        self.core.load(number, request, zip(named, rows, strict=True), self.step)
        return number

    def begin_store(self, request: str, named: Sequence[bytes], rows: Sequence[int]) -> int:
        number = next(self._numbers)
        self._open[number] = []
        places = {one: 16 * place for place, one in enumerate(named)}
        self.core.store(number, request, zip(named, rows, strict=True), places.get, self.step)
        return number

    def poll(self) -> None:
        """As vLLM does once a step. The rows are vLLM's again."""
        self.core.weights_known(self.known)
        for outcome in self.core.finished():
            number = outcome.job.number
            assert number in self._open, f"job {number} was reported twice, or never submitted"
            self.reported[number] = outcome
            for row in self._open.pop(number):
                self._settled[row] = self.rows[row].tobytes()

    def ended(self, number: int) -> JobOutcome:
        def over() -> JobOutcome | None:
            self.poll()
            return self.reported.get(number)

        found: JobOutcome = eventually(over, f"job {number} is reported")
        return found

    def load(self, request: str, named: Sequence[bytes], rows: Sequence[int]) -> list[bool]:
        """Of each chunk, whether it came."""
        outcome = self.ended(self.begin_load(request, named, rows))
        done = {chunk.key for chunk in outcome.done}
        assert outcome.complete == (len(done) == len(named))
        return [one in done for one in named]

    def store(self, request: str, named: Sequence[bytes], rows: Sequence[int]) -> bool:
        return self.ended(self.begin_store(request, named, rows)).complete

    def assert_untouched(self) -> None:
        """Since each load was reported, nothing wrote into its rows."""
        for row, before in self._settled.items():
            assert self.rows[row].tobytes() == before, f"row {row} was written after the report"

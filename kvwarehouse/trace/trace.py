"""A trace in memory: requests in the order of their time, as chains of page ids.

A Trace is immutable and thread-safe; a TraceBuilder belongs to one thread. Ids are dense, from 0:
an equal id means an equal prefix up to and including that block. 4 bytes a block asked for, 32 a
request, and while it is built one dictionary entry for each different block.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.errors import UsageError

# Ids are 32 bits in the core.
MOST_IDS = 2**32 - 64


@dataclass(frozen=True)
class Trace:
    """`ends[i]` is where request i ends in `pages`; it begins where the one before ends."""

    name: str
    format: str
    block_tokens: int
    pages: NDArray[np.uint32]
    ends: NDArray[np.uint64]
    times_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ids: int
    skipped: int = 0
    complaints: Sequence[str] = field(default=())

    @property
    def requests(self) -> int:
        return len(self.ends)

    @property
    def asked(self) -> int:
        return len(self.pages)

    @property
    def span_s(self) -> float:
        return float(self.times_s[-1] - self.times_s[0]) if self.requests else 0.0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Blocks that each request asks for."""
        ends = self.ends.astype(np.int64)
        return np.diff(ends, prepend=np.int64(0))


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace before its blocks have dense ids."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[Hashable]


class TraceBuilder:
    """Collects requests. They may come in any order; build() sorts them by time and keeps those of
    one time in the order they came."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._pages = array("I")
        self._ends = array("Q")
        self._times = array("d")
        self._inputs = array("q")
        self._outputs = array("q")

    def add(self, request: TraceRequest) -> None:
        known = self._known
        number = known.setdefault
        self._pages.extend([number(block, len(known)) for block in request.blocks])
        if len(known) > MOST_IDS:
            raise UsageError(
                f"the trace has more than {MOST_IDS:,} different blocks; replay a part of it",
                code="trace_too_large",
            )
        self._ends.append(len(self._pages))
        self._times.append(request.time_s)
        self._inputs.append(request.input_tokens)
        self._outputs.append(request.output_tokens)

    def build(
        self,
        name: str,
        form: str,
        block_tokens: int,
        *,
        skipped: int = 0,
        complaints: Sequence[str] = (),
    ) -> Trace:
        """Raises UsageError where there is nothing in it."""
        if not self._pages:
            raise UsageError(
                f"{name} has no request that asks for a block ({skipped:,} lines were skipped)",
                code="empty_trace",
            )
        times = np.array(self._times, dtype=np.float64)
        order = np.argsort(times, kind="stable")
        pages, ends = _in_order(
            np.array(self._pages, dtype=np.uint32), np.array(self._ends, dtype=np.int64), order
        )
        return Trace(
            name,
            form,
            block_tokens,
            pages,
            ends.astype(np.uint64),
            times[order],
            np.array(self._inputs, dtype=np.int64)[order],
            np.array(self._outputs, dtype=np.int64)[order],
            len(self._known),
            skipped,
            tuple(complaints),
        )


def _in_order(
    pages: NDArray[np.uint32], ends: NDArray[np.int64], order: NDArray[np.intp]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The chains one after the other in the order given."""
    if bool(np.all(order[:-1] < order[1:])):
        return pages, ends
    begins = np.concatenate(([0], ends[:-1]))
    chains = [pages[begins[at] : ends[at]] for at in order]
    return np.concatenate(chains), np.cumsum((ends - begins)[order])

"""The ring of memory for pages on their way out, against a list of intervals."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvwarehouse_connectors.core.staging_ring import StagingRing

SIZE = 4096
LINE = 64


class RingAgainstIntervals(RuleBasedStateMachine):
    """Pieces given are written full of a number of their own, and read again when they end."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = StagingRing(SIZE)
        self.held: deque[tuple[int, np.ndarray]] = deque()
        self.number = 0

    @rule(rows=st.integers(1, 40), row_bytes=st.integers(1, 300))
    def take(self, rows: int, row_bytes: int) -> None:
        piece = self.ring.take(rows, row_bytes)
        if piece is None:
            assert not self._fits(rows * row_bytes), "there was room in one piece"
            return
        assert piece.shape == (rows, row_bytes)
        assert piece.dtype == np.uint8
        assert piece.flags.c_contiguous
        assert piece.flags.writeable
        self.number = self.number % 255 + 1
        piece[:] = self.number
        self.held.append((self.number, piece))

    @precondition(lambda self: self.held)
    @rule()
    def give_back(self) -> None:
        number, piece = self.held.popleft()
        assert (piece == number).all(), "a piece was given twice"
        self.ring.give_back()

    @invariant()
    def counts_whole_lines_and_keeps_the_bound(self) -> None:
        held = sum(-(-piece.size // LINE) * LINE for _, piece in self.held)
        assert self.ring.used_bytes == held <= self.ring.size_bytes == SIZE

    def _fits(self, size_bytes: int) -> bool:
        """Whether a gap that follows the newest piece, or lies before the oldest, is that long."""
        size = -(-size_bytes // LINE) * LINE
        if not self.held:
            return size <= SIZE
        base = self._base()
        starts = [piece.ctypes.data - base for _, piece in self.held]
        end = starts[-1] + -(-self.held[-1][1].size // LINE) * LINE
        if starts[-1] < starts[0]:
            return end + size <= starts[0]
        return end + size <= SIZE or size <= starts[0]

    def _base(self) -> int:
        return int(self.ring._memory.ctypes.data)


TestRingAgainstIntervals = RingAgainstIntervals.TestCase


@given(st.integers(1, SIZE))
def test_empty_ring_gives_whatever_fits_however_it_came_to_be_empty(row_bytes: int) -> None:
    ring = StagingRing(SIZE)
    for _ in range(3):
        assert ring.take(1, row_bytes) is not None
        ring.give_back()
    assert ring.take(1, SIZE) is not None


@pytest.mark.parametrize(("rows", "row_bytes"), [(1, SIZE + 1), (SIZE + 1, 1), (2, SIZE)])
def test_ring_refuses_what_is_larger_than_itself(rows: int, row_bytes: int) -> None:
    ring = StagingRing(SIZE)
    assert ring.take(rows, row_bytes) is None
    assert ring.used_bytes == 0


def test_ring_never_stops_giving_while_the_oldest_comes_back() -> None:
    """A third of it at a time: it goes round many times, also where the end does not fit."""
    ring = StagingRing(SIZE)
    row_bytes = SIZE // 3 - 5
    held = 0
    for _ in range(100):
        if ring.take(1, row_bytes) is None:
            ring.give_back()
            held -= 1
            assert ring.take(1, row_bytes) is not None
        held += 1
    assert held >= 2

"""The chunk grid: what may be stored, what may be reused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvwarehouse as kvw
from kvwarehouse_connectors.transformers.grid import ChunkGrid

GRID = ChunkGrid(16, 64)


@given(prompt=st.integers(1, 1000), stored=st.integers(0, 1000))
def test_reused_part_is_stored_on_the_grid_and_leaves_a_token_to_compute(
    prompt: int, stored: int
) -> None:
    reused = GRID.reusable_tokens(prompt, stored)
    assert reused % 64 == 0
    assert 0 <= reused <= min(stored, prompt - 1)
    assert reused + 64 > min(stored, prompt - 1)


@given(prompt=st.integers(1, 1000), stored=st.integers(0, 1000))
def test_chunks_are_those_of_a_whole_computation(prompt: int, stored: int) -> None:
    start = GRID.reusable_tokens(prompt, stored)
    whole = list(GRID.chunks(0, prompt))
    assert list(GRID.chunks(start, prompt)) == [chunk for chunk in whole if chunk[0] >= start]
    assert whole[-1][1] == prompt


@given(prompt=st.integers(1, 1000))
def test_stored_tokens_lie_in_full_chunks(prompt: int) -> None:
    stored = GRID.storable_tokens(prompt)
    full = [end for first, end in GRID.chunks(0, prompt) if end - first == 64]
    assert stored == (full[-1] if full else 0)


@pytest.mark.parametrize("sizes", [(0, 64), (16, 0), (16, -64), (48, 64), (64, 16)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(kvw.UsageError):
        ChunkGrid(*sizes)

"""What comes out of a stream of chunks: whole pages in order, and nothing that was not counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse.client.grpc_transport import Filling, chunks
from kvwarehouse.client.regions import Regions
from kvwarehouse.errors import TransportError
from kvwarehouse.wire import CHUNK_BYTES


def rows(pages: int, page_bytes: int) -> tuple[Any, Regions]:
    array = np.zeros((pages, page_bytes), np.uint8)
    return array, Regions.rows(array, writable=True)


def pieces(pages: int, page_bytes: int) -> tuple[Any, Regions]:
    """The same memory, described as one block of one piece a page."""
    array = np.zeros((pages, page_bytes), np.uint8)
    blocks = [[page] for page in range(pages)]
    address = array.ctypes.data
    return array, Regions.strided([array], [address], [page_bytes], [page_bytes], blocks)


@pytest.mark.parametrize("made", [rows, pieces])
@given(pages=st.integers(1, 5), page_bytes=st.integers(1, 64), cuts=st.lists(st.integers(1, 150)))
def test_pages_are_whole_wherever_the_stream_is_cut(
    made: Any, pages: int, page_bytes: int, cuts: list[int]
) -> None:
    out, regions = made(pages, page_bytes)
    data = np.random.default_rng(1).integers(0, 256, pages * page_bytes, dtype=np.uint8).tobytes()
    filling = Filling(regions)
    sent = 0
    for cut in cuts:
        filling.add(data[sent : sent + cut])
        sent = min(len(data), sent + cut)
    filled = filling.cut()
    assert filled == sent // page_bytes
    assert filled.missed == {"timeout": pages - filled}
    assert out[:filled].tobytes() == data[: filled * page_bytes]


def test_summary_that_counts_less_than_was_sent_is_believed() -> None:
    _, regions = rows(3, 4)
    filling = Filling(regions)
    filling.add(b"abcdefgh")
    loaded = filling.finish(1, {"mismatch": 2})
    assert (loaded, loaded.missed) == (1, {"mismatch": 2})


def test_summary_that_counts_more_than_was_sent_is_refused() -> None:
    _, regions = rows(3, 4)
    filling = Filling(regions)
    filling.add(b"abcdefg")
    with pytest.raises(TransportError, match="counts 2 pages and sent 1"):
        filling.finish(2, {})


def test_stream_longer_than_what_was_asked_for_is_refused() -> None:
    _, regions = rows(1, 4)
    filling = Filling(regions)
    with pytest.raises(TransportError, match="more than the 1 pages"):
        filling.add(b"abcde")


@pytest.mark.parametrize("page_bytes", [1, 1000, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 3])
@pytest.mark.parametrize("made", [rows, pieces])
def test_chunks_are_the_pages_bytes_and_never_too_large(made: Any, page_bytes: int) -> None:
    array, regions = made(5, page_bytes)
    array[:] = np.random.default_rng(2).integers(0, 256, array.shape, dtype=np.uint8)
    sent = list(chunks(regions))
    assert b"".join(sent) == array.tobytes()
    assert max(map(len, sent)) <= CHUNK_BYTES
    assert len(sent) == -(-array.nbytes // CHUNK_BYTES)

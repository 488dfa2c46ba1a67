"""Memory of gRPC streams: bounded, refused at the bound, given back."""

from __future__ import annotations

import pytest

from kvwarehouse.daemon.transfer import BUFFER_BYTES, Staging
from kvwarehouse.errors import CapacityError, UsageError


def test_buffer_holds_whole_pages_up_to_its_bound() -> None:
    staging = Staging(64 << 20)
    with staging.buffer(3 << 20, 100) as buffer:
        assert buffer.shape == (BUFFER_BYTES // (3 << 20), 3 << 20)
        assert staging.bytes == buffer.nbytes
    with staging.buffer(4096, 3) as buffer:
        assert buffer.shape == (3, 4096)
    with staging.buffer(32 << 20, 3) as buffer:
        assert buffer.shape == (1, 32 << 20)
    assert (staging.streams, staging.bytes) == (0, 0)


def test_stream_beyond_the_memory_is_refused_for_now() -> None:
    staging = Staging(20 << 20)
    with staging.buffer(1 << 20, 99), pytest.raises(CapacityError) as caught:
        staging.buffer(1 << 20, 99).__enter__()
    assert caught.value.code == "staging_full"
    assert (staging.streams, staging.bytes) == (0, 0)


def test_page_beyond_all_memory_is_misuse() -> None:
    with pytest.raises(UsageError, match="--staging"):
        Staging(1 << 20).buffer(2 << 20, 1).__enter__()


def test_memory_is_given_back_when_the_stream_fails() -> None:
    staging = Staging(1 << 20)
    with pytest.raises(ZeroDivisionError), staging.buffer(4096, 1):
        raise ZeroDivisionError
    assert (staging.streams, staging.bytes) == (0, 0)

"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse.errors import UsageError
from kvwarehouse.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30), ("500GB", 500 * 10**9), ("1.5 TiB", 3 << 39), ("0", 0), (7, 7),
        (" 10 mib ", 10 << 20), ("512", 512), ("512B", 512), ("1kb", 1000), ("0.1KiB", 102),
        ("1PiB", 1 << 50),
    ],
)  # fmt: skip
def test_size_is_read_as_written(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "64G", "GiB", "-1", -1, "1e9", "1,5GiB", "64 GiB/s", "9999999PiB", True, 1.5, None]
)  # fmt: skip
def test_size_is_refused_with_its_name_and_value(text: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, name="--dram")  # type: ignore[arg-type]
    assert "--dram" in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "64GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 30, "64 GiB"), (1 << 60, "1024 PiB")],
)
def test_size_is_shown_with_three_digits(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 1 << 60))
def test_size_shown_and_read_again_is_within_a_percent(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.01, abs=1)

"""Token ids: whatever callers have becomes one array, or an error that names the place."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse.client.prompt import token_array
from kvwarehouse.errors import UsageError

LARGEST = 2**32 - 1


class Without:
    """As a tensor of torch that has no data."""

    def __index__(self) -> int:
        raise RuntimeError("cannot be called on meta tensors")


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 300], (1, 2, 300), np.array([1, 2, 300]), np.array([1, 2, 300], np.int32),
        np.array([1, 2, 300], np.uint16), np.array([1, 2, 300], ">i8"),
        array.array("q", [1, 2, 300]), array.array("I", [1, 2, 300]),
        memoryview(array.array("i", [1, 2, 300])),
        np.array([1, 0, 2, 0, 300, 0])[::2], [np.int64(1), np.uint8(2), 300],
    ],
)  # fmt: skip
def test_tokens_become_uint32_whatever_holds_them(tokens: Any) -> None:
    found = token_array(tokens)
    assert found.dtype == np.uint32
    assert found.flags.c_contiguous
    assert found.tolist() == [1, 2, 300]


def test_range_becomes_its_numbers() -> None:
    assert token_array(range(5, 8)).tolist() == [5, 6, 7]


@pytest.mark.parametrize("tokens", [[], (), np.array([]), array.array("i"), range(0)])
def test_no_tokens_are_an_empty_array(tokens: Any) -> None:
    assert token_array(tokens).size == 0


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_tokens_are_not_copied_when_they_are_contiguous_words(dtype: Any) -> None:
    tokens = np.arange(10, dtype=dtype)
    assert np.shares_memory(token_array(tokens), tokens)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_negative_token_is_refused_with_its_place(dtype: Any) -> None:
    with pytest.raises(UsageError, match=r"tokens\[2\] = -7 is out of range") as caught:
        token_array(np.array([1, 2, -7, -8], dtype))
    assert caught.value.context == {"position": "2"}


@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
def test_largest_token_is_taken_and_the_next_is_refused(dtype: Any) -> None:
    assert token_array(np.array([LARGEST], dtype)).tolist() == [LARGEST]
    with pytest.raises(UsageError, match=r"tokens\[1\] = 4294967296"):
        token_array(np.array([0, LARGEST + 1], dtype))


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, 2.0], r"tokens\[1\] = 2.0 is of type float"),
        ([1, True], r"tokens\[1\] = True is of type bool"),
        ([1, None], r"tokens\[1\] = None"),
        ([1, "2"], r"tokens\[1\] = '2'"),
        ([1, -1], r"tokens\[1\] = -1 is out of range"),
        ((1, 2**32), r"tokens\[1\] = 4294967296 is out of range"),
        ([1, np.array([2, 3])], r"tokens\[1\] = array\(\[2, 3\]\) is of type ndarray"),
        ([np.array([2])], r"tokens\[0\] = array\(\[2\]\) is of type ndarray"),
        ([Without()], r"tokens\[0\] = .* is of type Without"),
        ([1, 2**70], r"tokens\[1\] = \d+ is out of range"),
        (range(-1, 3), r"tokens\[0\] = -1"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1, 2]]), "2 dimensions"),
        (np.array(5), "0 dimensions"),
        (np.array(["1"]), "pass integers"),
        ("12", "type str"),
        (b"12", "type bytes"),
        ({1, 2}, "type set"),
        (object(), "dimensions"),
        (None, "dimensions"),
    ],
)
def test_tokens_of_the_wrong_kind_are_refused_by_name(tokens: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        token_array(tokens)
    assert caught.value.code == "bad_tokens"


@pytest.mark.parametrize(
    "tokens", [range(2**40), np.zeros(2**20 + 1, np.uint32), [0] * (2**20 + 1)]
)
def test_tokens_over_the_bound_are_refused_before_they_are_read(tokens: Any) -> None:
    with pytest.raises(UsageError, match="1048576") as caught:
        token_array(tokens)
    assert caught.value.code == "too_many_tokens"


def test_object_whose_array_protocol_fails_is_refused() -> None:
    class Foreign:
        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("lives on a device")

    with pytest.raises(UsageError, match="lives on a device"):
        token_array(Foreign())


@given(st.lists(st.integers(0, LARGEST)))
def test_list_and_array_give_equal_tokens(tokens: list[int]) -> None:
    assert token_array(tokens).tolist() == token_array(np.array(tokens, np.uint64)).tolist()

"""An engine's own keys as callers have them: good ones are taken as they are, others by name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvwarehouse import KeyRun, UsageError
from kvwarehouse.client.prompt import Runs, checked_keys
from kvwarehouse.wire import MAX_KEYS


class Digest(bytes):
    """An engine's own type of key."""


def test_keys_are_taken_as_they_are() -> None:
    assert checked_keys((b"a", b"b" * 64)) == [b"a", b"b" * 64]
    assert checked_keys([Digest(b"a"), b"b"]) == [b"a", b"b"]
    assert checked_keys([]) == []


def test_runs_are_laid_side_by_side() -> None:
    runs = [KeyRun([b"a", b"b"]), KeyRun((b"e",), 4, b"d"), KeyRun([])]
    assert checked_keys(runs) == Runs([b"a", b"b", b"e"], [2, 1, 0], [0, 4, 0], [None, b"d", None])


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (b"abc", "type bytes"), ("abc", "type str"), (5, "type int"), (KeyRun([b"a"]), "KeyRun"),
        ([b""], r"keys\[0\] is 0 bytes"),
        ([b"a", b"b" * 65], r"keys\[1\] is 65 bytes"), ([b"a", "b"], r"keys\[1\] is str"),
        ([b"a", KeyRun([b"b"])], r"keys\[1\] is KeyRun"),
        ([KeyRun([b"a"]), b"b"], r"keys\[1\] is bytes"),
        ([KeyRun([b"a"]), KeyRun(b"b")], r"keys\[1\].keys is of type bytes"),
        ([KeyRun([b"a"]), KeyRun({b"b"})], r"keys\[1\].keys is of type set"),
        ([KeyRun([b"a"]), KeyRun([b"b", b""])], r"keys of all runs\[2\] is 0 bytes"),
        ([KeyRun([b"a"], 1, b"p" * 65)], r"parents of runs\[0\] is 65 bytes"),
        ([KeyRun([b"a"], 1, "p")], r"parents of runs\[0\] is str"),
    ],
)  # fmt: skip
def test_keys_of_the_wrong_kind_are_refused_by_name(keys: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        checked_keys(keys)
    assert caught.value.code == "bad_key"


@pytest.mark.parametrize(
    "keys",
    [
        [b"a"] * (MAX_KEYS + 1),
        [KeyRun([])] * (MAX_KEYS + 1),
        [KeyRun([b"a"] * MAX_KEYS), KeyRun([b"b"])],
    ],
)
def test_keys_beyond_the_bound_of_a_call_are_refused(keys: Any) -> None:
    with pytest.raises(UsageError, match="pass fewer") as caught:
        checked_keys(keys)
    assert caught.value.code == "too_many_keys"


@pytest.mark.parametrize(
    ("position", "parent"),
    [(0, b"p"), (1, None), (-1, b"p"), (2**31, b"p"), (True, b"p"), (1.0, b"p"), ("1", b"p")],
)
def test_run_says_where_it_begins_or_is_refused(position: Any, parent: Any) -> None:
    with pytest.raises(UsageError, match="KeyRun") as caught:
        KeyRun([b"a"], position, parent)
    assert caught.value.code == "bad_run"


def test_run_is_a_value() -> None:
    run = KeyRun((b"a",), 3, b"p")
    assert pickle.loads(pickle.dumps(run)) == run == KeyRun((b"a",), parent=b"p", position=3)

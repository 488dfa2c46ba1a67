"""Namespaces: identity that cannot drift, and input that is refused with a reason."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from kvwarehouse import types
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Loaded, Namespace, StoreResult

SPACE = Namespace(
    model="m", weights="w", dtype="bfloat16", layout="a/1", page_tokens=64, page_bytes=8_388_608
)


def test_namespace_id_has_not_drifted() -> None:
    """Ledgers and NVMe records carry ids: another value here orphans every stored page."""
    assert SPACE.id.hex() == "46f03ba7e43646cd91fad4f8c76c3a2c"
    every = dataclasses.replace(
        SPACE, shards=8, kv_dtype="fp8_e4m3", attention_backend="b", cache_group="g", adapter="l",
        salt="s", hash_scheme="h", extra={"b": "2", "a": "1"},
    )  # fmt: skip
    assert every.id.hex() == "3513b04069a2240a57a7eb6ffb82e9e1"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"}, {"weights": "w2"}, {"dtype": "float16"}, {"layout": "a/2"},
        {"page_tokens": 65}, {"page_bytes": 1}, {"shards": 2}, {"kv_dtype": "x"},
        {"attention_backend": "x"}, {"cache_group": "x"}, {"adapter": "x"}, {"salt": "x"},
        {"hash_scheme": "x"}, {"extra": {"x": ""}},
    ],
)  # fmt: skip
def test_namespace_id_differs_when_any_field_differs(change: dict[str, Any]) -> None:
    other = dataclasses.replace(SPACE, **change)
    assert other.id != SPACE.id
    assert other != SPACE


def test_namespace_ids_differ_when_text_moves_between_fields() -> None:
    one = dataclasses.replace(SPACE, model="ab", weights="c")
    two = dataclasses.replace(SPACE, model="a", weights="bc")
    salted = dataclasses.replace(SPACE, salt="x")
    extra = dataclasses.replace(SPACE, extra={"salt": "x"})
    assert len({one.id, two.id, salted.id, extra.id}) == 4


def test_namespace_id_is_equal_when_extra_has_another_order() -> None:
    one = dataclasses.replace(SPACE, extra={"a": "1", "b": "2"})
    two = dataclasses.replace(SPACE, extra={"b": "2", "a": "1"})
    assert one == two
    assert one.id == two.id
    assert hash(one) == hash(two)


def test_shown_fields_have_the_same_digest_of_a_salt_every_time_and_not_the_salt() -> None:
    salted = dataclasses.replace(SPACE, salt="tenant")
    assert salted.shown_fields() == {**salted.to_fields(), "salt": "sha256:e9da86d3"}
    unsalted = dataclasses.replace(SPACE, salt="")
    assert unsalted.shown_fields() == unsalted.to_fields()


def test_namespace_survives_json_pickle_and_copies() -> None:
    space = dataclasses.replace(SPACE, extra={"a": "1"}, salt="tenant")
    again = Namespace.from_fields(json.loads(json.dumps(space.to_fields())))
    for other in (again, pickle.loads(pickle.dumps(space)), copy.deepcopy(space)):
        assert other == space
        assert other.id == space.id


def test_namespace_cannot_be_changed_through_its_extra() -> None:
    given = {"a": "1"}
    space = dataclasses.replace(SPACE, extra=given)
    given["a"] = "2"
    assert space.extra == {"a": "1"}
    with pytest.raises(TypeError):
        space.extra["a"] = "2"  # type: ignore[index]


def test_namespace_takes_integers_of_numpy() -> None:
    space = dataclasses.replace(SPACE, page_tokens=np.int64(64), page_bytes=np.uint32(8_388_608))
    assert space.id == SPACE.id
    json.dumps(space.to_fields())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""), ("model", "  "), ("weights", None), ("dtype", 7), ("layout", "a\nb"),
        ("model", "x" * 1025), ("salt", "\x00"), ("salt", "\ud800"), ("hash_scheme", ""),
        ("page_tokens", 0), ("page_tokens", 4097), ("page_tokens", -1), ("page_tokens", 1.0),
        ("page_tokens", True), ("page_tokens", "64"), ("page_bytes", 0),
        ("page_bytes", (1 << 30) + 1), ("shards", 0), ("shards", 65), ("shards", None),
        ("extra", []), ("extra", {"a": 1}), ("extra", {"": "x"}), ("extra", {1: "x"}),
        ("extra", {str(n): "" for n in range(65)}),
    ],
)  # fmt: skip
def test_namespace_is_refused_by_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(SPACE, **{name: value})
    assert caught.value.code == "bad_namespace"
    assert name in str(caught.value)


@pytest.mark.parametrize("fields", [{"unknown": "x"}, {"id": b"x"}])
def test_namespace_refuses_fields_it_does_not_know(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not a field"):
        Namespace.from_fields({**SPACE.to_fields(), **fields})


@pytest.mark.parametrize("name", ["model", "weights", "dtype", "layout", "page_tokens"])
def test_namespace_refuses_missing_fields_by_name(name: str) -> None:
    fields = SPACE.to_fields()
    del fields[name]
    with pytest.raises(UsageError, match=name):
        Namespace.from_fields(fields)


def test_bounds_are_those_of_the_native_core() -> None:
    native = pytest.importorskip("kvwarehouse.core._native", reason="the core is not built")
    assert types.MAX_SHARDS == native.MAX_SHARDS
    assert types.MAX_PAGE_TOKENS == native.MAX_PAGE_TOKENS


def test_loaded_is_an_int_that_keeps_its_reasons() -> None:
    loaded = Loaded(3, {"evicted": 2})
    assert loaded == 3
    assert loaded + 1 == 4
    assert pickle.loads(pickle.dumps(loaded)).missed == {"evicted": 2}


def test_store_result_adds_up_its_drops() -> None:
    assert StoreResult(1, 2, {"full": 3, "busy": 4}).dropped_pages == 7

"""A request's own wishes: what is read as no, and that misspelt ones are not lost in silence."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from kvwarehouse_connectors.vllm.handoff import RECORD
from kvwarehouse_connectors.vllm.wishes import (
    HANDOFF,
    KEEP_AS,
    KEEP_S,
    LOAD,
    RELEASE,
    STORE,
    UnknownWishes,
    asked,
    keep_as,
    keep_s,
    switch,
)
from vllm_parts.halves import Engine
from vllm_parts.requests import request


class Found:
    def __init__(self) -> None:
        self.counted: list[str] = []
        self._unknown = UnknownWishes(self.counted.append)

    def count(self, params: Any) -> int:
        self.counted.clear()
        self._unknown.look_for(params)
        assert set(self.counted) <= {"unknown_wishes"}
        return len(self.counted)


@pytest.mark.parametrize("no", [False, 0, "false", "False", "no", "OFF", "0"])
def test_no_is_understood_as_people_write_it(no: Any) -> None:
    assert not switch({LOAD: no}, LOAD)
    assert switch({LOAD: no}, STORE)
    assert Found().count({LOAD: no, STORE: no}) == 0


@pytest.mark.parametrize("yes", [None, True, 1, "true", "yes", "on", "1"])
def test_yes_is_what_there_is_without_a_wish(yes: Any) -> None:
    assert switch({LOAD: yes}, LOAD)
    assert switch(None, LOAD)
    assert Found().count({LOAD: yes}) == 0


@pytest.mark.parametrize("odd", ["maybe", "falsehood", "no" * 10_000, 2, 0.5, [False], {}])
def test_value_that_is_neither_is_counted_and_read_as_yes(odd: Any) -> None:
    assert switch({STORE: odd}, STORE)
    assert Found().count({STORE: odd}) == 1


@pytest.mark.parametrize("name", [HANDOFF, RELEASE])
def test_what_has_to_be_asked_for_is_true_alone(name: str) -> None:
    assert asked({name: True}, name)
    assert not any(asked({name: other}, name) for other in (None, False, 1, "yes", "true", [True]))
    assert not asked({}, name)
    assert not asked(None, name)


@pytest.mark.parametrize(
    ("params", "unknown"),
    [
        (None, 0),
        ({}, 0),
        ({"do_remote_prefill": True, RECORD: {"version": 1}, HANDOFF: True}, 0),
        ({"kvwarehouse.lod": False}, 1),
        ({"kvwarehouse_load": False, "kvwarehouse.stor": False, LOAD: False}, 2),
        ({HANDOFF: "yes"}, 1),
        ({RELEASE: True}, 0),
        ({RELEASE: 1}, 1),
        ({KEEP_S: 600, KEEP_AS: "session 7"}, 0),
        ({KEEP_S: None, KEEP_AS: None}, 0),
        ({KEEP_S: 0.5}, 1),
        ({KEEP_S: "10m", KEEP_AS: 7}, 2),
    ],
)
def test_names_of_ours_that_there_are_not_are_counted_and_those_of_others_are_not(
    params: Any, unknown: int
) -> None:
    assert Found().count(params) == unknown


@pytest.mark.parametrize("value", [0, 0.5, -1, True, "600", None, 1e12, float("nan"), [600]])
def test_time_that_is_none_keeps_nothing(value: Any) -> None:
    assert keep_s({KEEP_S: value}, 3600) == 0


@pytest.mark.parametrize("value", [1, 600, 0.5 + 600, 366 * 86_400])
def test_time_to_keep_is_in_seconds(value: float) -> None:
    assert keep_s({KEEP_S: value}, 1e9) == value
    assert keep_s({KEEP_S: value}, 0.5) == 0.5
    assert keep_s({}, 3600) == keep_s(None, 3600) == 0


@pytest.mark.parametrize("value", [None, "", 7, "a\nb", "x" * 201, "\ud800"])
def test_name_that_is_none_is_the_requests(value: Any) -> None:
    assert keep_as({KEEP_AS: value}, "cmpl-1", None) == "request:cmpl-1"
    chosen = keep_as({KEEP_AS: value}, "a\nb", None)
    assert chosen.startswith("request:")
    assert chosen != keep_as(None, "a\nb", None)


def test_names_of_salts_are_apart() -> None:
    wish = {KEEP_AS: "session 7"}
    names = {keep_as(wish, "cmpl-1", salt) for salt in (None, "", "a", "b")}
    assert len(names) == 3
    assert "request:session 7" in names
    assert all(name.endswith(":session 7") for name in names)


def test_name_is_logged_once_with_those_that_there_are(caplog: pytest.LogCaptureFixture) -> None:
    found = Found()
    for _ in range(3):
        assert found.count({"kvwarehouse.lod": "a\nb"}) == 1
    (record,) = caplog.records
    assert r"'kvwarehouse.lod': 'a\nb'" in record.getMessage()
    assert all(name in record.getMessage() for name in (LOAD, STORE, HANDOFF, RELEASE, KEEP_S))


def test_strangers_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    found = Found()
    for number in range(1000):
        assert found.count({f"kvwarehouse.{number}" + "x" * 10_000: "y" * 10_000}) == 1
    assert len(caplog.records) == 32
    assert max(len(record.getMessage()) for record in caplog.records) < 500


def test_engine_counts_what_a_request_misspelt(engine: Engine) -> None:
    engine.scheduler.on_new_request(request(list(range(40)), params={"kvwarehouse.lod": False}))
    stats = engine.scheduler.step_ends()
    assert stats is not None
    assert stats.data["unknown_wishes"] == 1

"""The hand-off record and the rule of waiting. Needs no vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse_connectors.vllm.handoff import (
    RECORD,
    VERSION,
    Handoff,
    HandoffOutcome,
    Record,
    boot_s,
    decode,
    digest,
    encode,
)

GOOD = Record("a" * 32, "b" * 32, "c" * 32, 4096, 100.0)
WAIT_S = 2.0


def fields(**changes: Any) -> dict[str, Any]:
    """A good record's, but for `changes`; ... leaves a field out."""
    found = {**encode(GOOD)[RECORD], **changes}
    return {name: value for name, value in found.items() if value is not ...}


# -- the record


def test_record_comes_back_from_json_as_it_was() -> None:
    assert decode(json.loads(json.dumps(encode(GOOD)))) == GOOD


def test_record_says_its_version_and_what_others_put_beside_it_is_left_alone() -> None:
    assert encode(GOOD)[RECORD]["version"] == VERSION
    assert decode({**encode(GOOD), "do_remote_prefill": True, "kvwarehouse.load": True}) == GOOD


@pytest.mark.parametrize("params", [None, {}, {RECORD: None}, {"remote_engine_id": "x"}])
def test_nothing_is_no_record_and_not_a_bad_one(params: dict[str, Any] | None) -> None:
    assert decode(params) is None


@pytest.mark.parametrize(
    "record",
    [
        *("", "x", [], [1], {}, 7, True, b"bytes"),
        {"tokens": 4096},
        fields(version=...),
        fields(version="1"),
        fields(version=True),
        fields(version=1.0),
        *(fields(**{name: ...}) for name in ("warehouse", "namespaces", "prompt", "tokens")),
        fields(made_s=...),
        fields(more=1),
        *(fields(**{name: None}) for name in ("warehouse", "namespaces", "prompt", "tokens")),
        fields(warehouse="a" * 31),
        fields(namespaces="b" * 1_000_000),
        fields(prompt=["c"] * 32),
        *(fields(tokens=tokens) for tokens in (0, -1, 1 << 31, 10**400, 1.5, "1", True, [])),
        *(fields(made_s=made_s) for made_s in (-1, 1e300, 10**400, "1", True, [], {})),
        *(fields(made_s=float(name)) for name in ("nan", "inf", "-inf")),
    ],
)
def test_odd_record_is_malformed(record: Any) -> None:
    assert decode({RECORD: record}) is HandoffOutcome.MALFORMED


@pytest.mark.parametrize("version", [0, 2, -1, 10**400])
def test_record_of_another_version_is_told_apart_whatever_else_it_says(version: int) -> None:
    assert decode({RECORD: {"version": version, "new": 1}}) is HandoffOutcome.OTHER_VERSION
    assert decode({RECORD: fields(version=version)}) is HandoffOutcome.OTHER_VERSION


TEXT = st.text("ab0", max_size=33)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(fields())), JSON))
def test_whatever_comes_is_a_sound_record_or_a_reason(changes: dict[str, Any]) -> None:
    found = decode({RECORD: fields(**changes)})
    if isinstance(found, Record):
        assert encode(found) == {RECORD: fields(**changes)}
        Handoff(found, WAIT_S).judge(boot_s(), complete=False, alive=True)
    else:
        assert found in (HandoffOutcome.MALFORMED, HandoffOutcome.OTHER_VERSION)


def test_digest_tells_apart_where_one_part_ends_and_the_next_begins() -> None:
    seen = {digest(parts) for parts in ([], [b""], [b"ab"], [b"a", b"b"], [b"", b"ab"], [b"ba"])}
    assert len(seen) == 6
    assert digest([b"ab", b"c"]) == digest(iter([b"ab", b"c"]))
    assert len(digest([b"key"])) == len(GOOD.prompt)


# -- whose it is


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"warehouse": "x"}, HandoffOutcome.OTHER_WAREHOUSE),
        ({"namespaces": "x"}, HandoffOutcome.OTHER_NAMESPACE),
        ({"prompt": "x"}, HandoffOutcome.OTHER_PROMPT),
        ({"prompt": ""}, HandoffOutcome.OTHER_PROMPT),
    ],
)
def test_record_of_others_is_refused_by_what_differs(
    changes: dict[str, str], reason: HandoffOutcome | None
) -> None:
    mine = {name: getattr(GOOD, name) for name in ("warehouse", "namespaces", "prompt")}
    assert Handoff(GOOD, WAIT_S).refusal(**{**mine, **changes}) is reason


# -- the wait


def judge(handoff: Handoff, now_s: float, *, complete: bool = False, alive: bool = True) -> Any:
    return handoff.judge(now_s, complete=complete, alive=alive)


def test_request_whose_pages_are_there_does_not_wait() -> None:
    handoff = Handoff(GOOD, WAIT_S)
    assert judge(handoff, 100.1, complete=True) is HandoffOutcome.COMPLETE
    assert not handoff.waits


def test_request_waits_until_its_pages_are_there() -> None:
    handoff = Handoff(GOOD, WAIT_S)
    assert judge(handoff, 100.1) is None
    assert handoff.waits
    assert judge(handoff, 101.9) is None
    assert judge(handoff, 101.95, complete=True) is HandoffOutcome.COMPLETE


def test_wait_ends_at_its_bound_from_when_the_record_was_made() -> None:
    handoff = Handoff(GOOD, WAIT_S)
    assert judge(handoff, 101.5) is None
    assert judge(handoff, 101.99) is None
    assert judge(handoff, 102.0) is HandoffOutcome.EXPIRED


def test_record_that_came_after_its_bound_is_late() -> None:
    assert judge(Handoff(GOOD, WAIT_S), 102.0) is HandoffOutcome.LATE
    assert judge(Handoff(GOOD, WAIT_S), 101.99) is None


def test_late_record_whose_pages_are_there_is_complete() -> None:
    assert judge(Handoff(GOOD, WAIT_S), 5000.0, complete=True) is HandoffOutcome.COMPLETE


def test_record_from_the_future_gives_no_longer_wait() -> None:
    handoff = Handoff(replace(GOOD, made_s=1e9), WAIT_S)
    assert judge(handoff, 100.0) is None
    assert judge(handoff, 101.99) is None
    assert judge(handoff, 102.0) is HandoffOutcome.EXPIRED


def test_nobody_waits_for_a_dead_daemon() -> None:
    handoff = Handoff(GOOD, WAIT_S)
    assert judge(handoff, 100.1, alive=False) is HandoffOutcome.EXPIRED
    handoff = Handoff(GOOD, WAIT_S)
    assert judge(handoff, 100.1) is None
    assert judge(handoff, 100.2, alive=False) is HandoffOutcome.EXPIRED


def test_bound_of_zero_is_no_wait() -> None:
    assert judge(Handoff(GOOD, 0.0), 100.0) is HandoffOutcome.LATE


@given(st.floats(0, 1e6), st.floats(0, 60), st.lists(st.floats(0, 30), max_size=20))
def test_no_wait_is_longer_than_its_bound(made_s: float, wait_s: float, steps: list[float]) -> None:
    """From the first question on, whatever the record says."""
    handoff = Handoff(replace(GOOD, made_s=made_s), wait_s)
    now_s = first_s = 1000.0
    for step in steps:
        outcome = judge(handoff, now_s)
        if outcome is None:
            assert now_s - first_s < wait_s
        else:
            assert outcome in (HandoffOutcome.EXPIRED, HandoffOutcome.LATE)
            assert now_s >= min(made_s, first_s) + wait_s
            return
        now_s += step


def test_clock_of_records_rises_and_is_the_hosts() -> None:
    with open("/proc/uptime", encoding="ascii") as file:
        up_s = float(file.read().split()[0])
    assert boot_s() >= up_s - 1
    assert boot_s() <= boot_s()


def test_counters_name_every_outcome() -> None:
    """stats.py needs vLLM, its text does not."""
    from pathlib import Path

    import kvwarehouse_connectors.vllm.handoff as module

    text = Path(module.__file__).with_name("stats.py").read_text(encoding="utf-8")
    assert [o for o in HandoffOutcome if f'"handoff_{o.value}"' not in text] == []

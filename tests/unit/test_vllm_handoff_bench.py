"""What the bench of hand-offs asks of its engines, in which order, and which way its ratios go.

The engines here are contract models: they answer what a test says, and note what they were asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

import pytest

from kvwarehouse.report.report import Report
from kvwarehouse_bench.harness.process import ProgramError
from kvwarehouse_bench.vllm.checkpoint import SHAPES
from kvwarehouse_bench.vllm.engine import ALONE, warehouse_transfer
from kvwarehouse_bench.vllm.handoff_report import handoff_report, tokens_per_s
from kvwarehouse_bench.vllm.messages import DEVICE, HOST, MISSED_BLOCKS, Ask, EngineReply
from kvwarehouse_bench.vllm.pair import (
    END_TO_END,
    HANDOFF,
    NO_HANDOFF,
    PREFILL,
    PREFIX_CACHE,
    STORED,
    WAYS,
    EnginePair,
)
from kvwarehouse_bench.vllm.results import TtftResults, TtftSample
from kvwarehouse_bench.vllm.warehouse import EngineWarehouse

PROMPT = list(range(2 * 32 + 9))
RECORD = {"kvwarehouse": {"tokens": 64}}
COMPLETE = "kvwarehouse_connector_handoff_complete_total"
WAITS = "kvwarehouse_connector_handoff_waits_total"

Answers = Callable[[Ask], EngineReply]


class Model:
    """One engine, and its part of the log that all share."""

    def __init__(self, name: str, log: list[tuple[str, Any]], answers: Answers) -> None:
        self._name, self._log, self._answers = name, log, answers

    def ask(self, asks: Sequence[Ask]) -> EngineReply:
        (one,) = asks
        assert list(one.tokens) == PROMPT
        self._log.append((self._name, dict(one.params)))
        return self._answers(one)

    def forget(self, *, connector: bool = False) -> None:
        self._log.append((self._name, "forgets"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class Emptied:
    """Of a warehouse, what the bench does to it."""

    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self._log = log

    def clear(self) -> None:
        self._log.append(("warehouse", "clears"))


class Stage:
    """decode: answers to the requests that are neither alone nor without what a test counts."""

    def __init__(
        self, counts: Mapping[str, float] | None = None, record: Mapping[str, Any] | None = RECORD
    ) -> None:
        self.log: list[tuple[str, Any]] = []
        loaded = {HOST: 64.0} if counts is None else counts
        prefilled = EngineReply(4.0, [4.0], {}, record)

        def decoded(ask: Ask) -> EngineReply:
            if ask.params == ALONE:  # from its own cache, where it was asked just before
                warm = self.log[-2][0] == "settle" and self.log[-3] == ("decode", {})
                return (
                    EngineReply(0.1, [0.1], {DEVICE: 64.0}) if warm else EngineReply(3.0, [3.0], {})
                )
            return EngineReply(0.5 if ask.params else 0.25, [0.5], loaded)

        self.pair = EnginePair(
            Model("prefill", self.log, lambda _: prefilled),
            Model("decode", self.log, decoded),
            cast(EngineWarehouse, Emptied(self.log)),
            lambda: self.log.append(("settle", None)),
        )

    def asked(self) -> list[tuple[str, Any]]:
        return [entry for entry in self.log if isinstance(entry[1], dict)]


def test_decode_engine_gets_the_prefill_engines_record_unread_and_at_once() -> None:
    stage = Stage()
    stage.pair.round(PROMPT)
    at = stage.log.index(("prefill", {}))
    assert stage.log[at + 1] == ("decode", RECORD)


def test_every_other_request_comes_to_engines_that_sleep() -> None:
    stage = Stage()
    stage.pair.round(PROMPT)
    for at, (name, what) in enumerate(stage.log):
        if isinstance(what, dict) and what != RECORD:
            assert stage.log[at - 1] == ("settle", None), f"{name} {what}"


def test_nothing_is_left_of_the_prompt_where_it_is_to_be_computed_or_to_come() -> None:
    stage = Stage()
    stage.pair.round(PROMPT, turn=1)  # with a hand-off first, which leaves it everywhere
    begin, end = stage.log.index(("warehouse", "clears")), stage.log.index(("prefill", {}))
    assert {("prefill", "forgets"), ("decode", "forgets")} <= set(stage.log[begin:end])
    stored = stage.log.index(("decode", {}))
    assert ("decode", "forgets") in stage.log[stage.log.index(("decode", RECORD)) : stored]
    alone = [at for at, entry in enumerate(stage.log) if entry == ("decode", ALONE)]
    assert ("decode", "forgets") not in stage.log[stored : alone[0]], "the prefix cache"
    assert ("decode", "forgets") in stage.log[alone[0] : alone[1]], "no hand-off"


def test_with_and_without_handoff_are_first_in_turns() -> None:
    first = []
    for turn in range(4):
        stage = Stage()
        stage.pair.round(PROMPT, turn)
        first.append(stage.asked()[0][0])
    assert first == ["decode", "prefill", "decode", "prefill"]


@pytest.mark.parametrize("turn", [0, 1])
def test_round_has_a_sample_of_each_way_and_a_client_waits_for_both_engines(turn: int) -> None:
    assert Stage().pair.round(PROMPT, turn) == {
        NO_HANDOFF: TtftSample(3.0, 1.0),
        HANDOFF: TtftSample(0.5, 1.0),
        STORED: TtftSample(0.25, 1.0),
        PREFIX_CACHE: TtftSample(0.1, 1.0),
        PREFILL: TtftSample(4.0, 1.0),
        END_TO_END: TtftSample(4.5, 1.0),
    }


def test_share_of_a_handoff_has_neither_what_did_not_come_nor_what_was_never_promised() -> None:
    half = Stage({HOST: 64.0, MISSED_BLOCKS: 1.0}).pair.round(PROMPT)
    assert (half[HANDOFF].share, half[END_TO_END].share) == (0.5, 0.5)
    assert Stage({}).pair.round(PROMPT)[HANDOFF].share == 0.0


def test_records_are_counted_by_how_it_ended_with_them() -> None:
    stage = Stage({HOST: 64.0, COMPLETE: 1.0, WAITS: 1.0})
    for turn in range(3):
        stage.pair.round(PROMPT, turn)
    assert stage.pair.outcomes == {"complete": 3, "waits": 3}


@pytest.mark.parametrize("record", [None, {}])
def test_prefill_that_gives_no_record_ends_the_bench_with_why(record: Any) -> None:
    with pytest.raises(ProgramError, match="no hand-off record"):
        Stage(record=record).pair.round(PROMPT)


def test_roles_reach_the_engines() -> None:
    for role in ("kv_producer", "kv_consumer"):
        assert warehouse_transfer("unix:///s", role)["kv_role"] == role
    assert warehouse_transfer("unix:///s")["kv_role"] == "kv_both"


# --- the report


def found(**seconds: Sequence[float]) -> TtftResults:
    names = {way.replace(" ", "_").replace("-", "_"): way for way in WAYS}
    made = TtftResults(SHAPES["tiny"], [1024], {"machine": "m"}, 1e9, tail_tokens=9)
    for name, way in names.items():
        for taken in seconds.get(name, [1.0, 1.0, 1.0]):
            made.add(way, 1024, TtftSample(taken, 1.0))
    return made


def rows(report: Report, title: str) -> list[Sequence[Any]]:
    (block,) = [block for block in report.tables if block.title == title]
    return list(block.rows)


def test_ratio_of_the_handoff_is_above_one_where_it_is_quicker_and_of_the_whole_where_slower() -> (
    None
):
    report = handoff_report(
        found(no_hand_off=[8.0, 8.0, 9.0], hand_off=[2.0, 4.0, 3.0], end_to_end=[10.0, 12.0, 9.0]),
        {},
    )
    (compared,) = rows(report, "ratios")
    assert compared[1].startswith("3.00 (")  # the median of 4, 2 and 3
    assert compared[-1].startswith("1.25 (")  # of 1.25, 1.5 and 1
    assert "3.0 times as fast" in report.summary
    assert "1.25 times as long" in report.summary


def test_machines_rate_is_that_of_whole_prompts_computed() -> None:
    assert tokens_per_s(found(no_hand_off=[0.5, 0.5, 2.0]), 1024) == 1033 / 0.5


def test_handoff_that_came_in_part_shows_how_much() -> None:
    made = found()
    made.samples[HANDOFF][1024] = [replace(s, share=0.5) for s in made.samples[HANDOFF][1024]]
    (row,) = rows(handoff_report(made, {}), "time to first token, ms")
    assert sum(str(cell).endswith(" 50%") for cell in row) == 1


def test_figures_are_json_with_every_round_and_outcome() -> None:
    report = handoff_report(found(hand_off=[1.0, 2.0, 4.0]), {"complete": 3})
    told = json.loads(json.dumps(report.figures))
    assert told["lengths"][0]["ttft_s"][HANDOFF] == [1.0, 2.0, 4.0]
    assert told["outcomes"] == {"complete": 3}
    assert rows(report, "hand-off records, as the decode engine counted them") == [["complete", 3]]

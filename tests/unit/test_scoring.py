"""The reference choice among warehouses: what its score is made of, and how it breaks ties."""

from __future__ import annotations

from typing import Any

import pytest

from kvwarehouse.client.routing import Answer, Holding, Question, who_has
from kvwarehouse.client.scoring import Costs, choose
from kvwarehouse.errors import UsageError

PROMPT = Question(tokens=list(range(1000)))


def answer(name: str, dram: int = 0, nvme: int = 0, **fields: Any) -> Answer:
    """A warehouse with so many pages of 10 tokens."""
    held = Holding(b"n" * 16, "m", 10, 4096, 1, pages=dram + nvme, dram_pages=dram)
    return Answer(name, warehouse_id=name.encode() * 4, holding=held, **fields)


def best(*answers: Answer, **options: Any) -> str:
    chosen = choose(answers, options.pop("question", PROMPT), **options).best
    assert chosen is not None
    return chosen.answer.address


def test_score_is_tokens_less_what_loading_them_costs() -> None:
    ranking = choose([answer("a", dram=10, nvme=20)], PROMPT, costs=Costs(dram=0.25, nvme=0.5))
    assert ranking.candidates[0].score == 100 * 0.75 + 200 * 0.5


@pytest.mark.parametrize(
    ("answers", "chosen"),
    [
        ([answer("a", dram=3), answer("b", dram=4)], "b"),
        ([answer("a", nvme=10), answer("b", dram=9)], "b"),
        ([answer("a", nvme=20), answer("b", dram=9)], "a"),
        ([answer("a"), answer("b", nvme=1)], "b"),
    ],
)
def test_more_of_the_prompt_wins_and_disk_counts_less(answers: list[Answer], chosen: str) -> None:
    assert best(*answers) == chosen


def test_requests_under_way_cost_what_they_are_said_to() -> None:
    answers = [answer("a", dram=100), answer("b", dram=10)]
    costs = Costs(dram=0, nvme=0, request_tokens=100)
    assert best(*answers, costs=costs, requests={"a": 8}) == "a"
    assert best(*answers, costs=costs, requests={"a": 10}) == "b"


def test_ties_go_to_fewer_requests_then_to_dram() -> None:
    free = Costs(dram=0, nvme=0, request_tokens=0)
    answers = [answer("a", dram=5), answer("b", dram=5)]
    assert best(*answers, costs=free, requests={"a": 1}) == "b"
    assert best(*answers, costs=free, requests={"b": 1}) == "a"
    assert best(answer("a", nvme=5), answer("b", dram=5), costs=free) == "b"


def test_prompts_that_begin_alike_meet_in_one_place_and_others_spread() -> None:
    answers = [answer(name) for name in "abcd"]
    chosen = set()
    for start in range(64):
        beginning = list(range(start, start + 256))
        first = best(*answers, question=Question(tokens=[*beginning, 1]))
        other = best(*reversed(answers), question=Question(tokens=[*beginning, 2, 3]))
        assert first == other
        chosen.add(first)
    assert chosen == set("abcd")
    # One that goes takes its own prompts with it, and leaves the others where they are.
    for start in range(16):
        question = Question(tokens=list(range(start, start + 256)))
        before = best(*answers, question=question)
        if before != "d":
            assert best(*answers[:3], question=question) == before


def test_who_did_not_answer_or_drains_is_left_out_and_said() -> None:
    ranking = choose(
        [answer("a", dram=50, draining=True), Answer("b", problem="no daemon"), answer("c")], PROMPT
    )
    assert [c.answer.address for c in ranking.candidates] == ["c"]
    assert [a.address for a in ranking.left_out] == ["a", "b"]
    assert choose([Answer("b", problem="gone")], PROMPT).best is None


def test_warehouse_without_the_namespace_is_a_candidate_with_nothing() -> None:
    ranking = choose([Answer("a", warehouse_id=b"a" * 16)], PROMPT)
    assert ranking.candidates[0].score == 0


@pytest.mark.parametrize("costs", [{"dram": -0.1}, {"nvme": 1.5}, {"request_tokens": float("nan")}])
def test_costs_that_cannot_be_are_refused(costs: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="cost"):
        Costs(**costs)


def test_requests_of_an_address_that_was_not_asked_are_refused() -> None:
    with pytest.raises(UsageError, match="none of the addresses"):
        choose([answer("a")], PROMPT, requests={"b": 1})


@pytest.mark.parametrize(
    ("addresses", "question"),
    [
        ([], PROMPT),
        (["/a", "/a"], PROMPT),
        (["nonsense"], PROMPT),
        (["/a"], Question()),
        (["/a"], Question(tokens=[1], keys=[b"k"])),
        (["/a"], Question(tokens=[1], model="m", namespace_id=b"i" * 16)),
        (["/a"], Question(tokens=[-1])),
        (["/a"], Question(keys=[b""])),
    ],
)
def test_questions_that_cannot_be_are_refused(addresses: list[str], question: Question) -> None:
    with pytest.raises(UsageError):
        who_has(addresses, question)

"""Made workloads: what was published of their models, answers by arithmetic, the same bytes for the
same seed."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from kvwarehouse.planning.replay import ReplaySetup, run_replay
from kvwarehouse.trace.trace import Trace, TraceBuilder
from kvwarehouse.workloads.agents import MOST_THINK_S, VARIANTS, Agents
from kvwarehouse.workloads.call import WorkloadCall, of_blocks
from kvwarehouse.workloads.catalogue import KINDS
from kvwarehouse.workloads.conversations import PROFILES, Chat, ConversationPool
from kvwarehouse.workloads.draws import Draws, QuantileCurve
from kvwarehouse.workloads.fit import SOURCES, Source, fits
from kvwarehouse.workloads.synthetic import DocumentQa, TierSweep
from kvwarehouse.workloads.trace_writer import WorkloadBounds, bounded, bounded_sessions

CHAT = Chat(1, PROFILES["conversation"], 3.9)


def made(name: str, seed: int, **settings: Any) -> Any:
    kind = KINDS[name]
    defaults = {each: setting.default for each, setting in kind.settings.items()}
    return kind.make(seed, kind.requests_per_s, defaults | settings)


def trace_of(workload: Any, most: int = 3_000) -> Trace:
    builder = TraceBuilder()
    for call in islice(workload.calls(), most):
        builder.add(call.request)
    return builder.build("made", "mooncake", workload.block_tokens)


def hit_rate(workload: Any, pages: int | None = None) -> float:
    return run_replay(trace_of(workload), ReplaySetup(dram_pages=pages)).hit_rate


# --- what was published ---------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_workload_is_as_near_as_said_to_what_was_published(source: Source) -> None:
    for fit in fits(source):
        assert fit.fits, (
            f"{fit.figure}: published {fit.published}, made {fit.mean:.4g} {fit.values}"
        )


# --- by arithmetic --------------------------------------------------------------------------------


def document_qa(**changes: Any) -> DocumentQa:
    return made("document-qa", 3, **changes)


def test_documents_asked_about_again_are_hit_whole() -> None:
    # 19 whole blocks and a part of one, equal in all prompts about a document.
    assert hit_rate(document_qa(documents=5, queries=4)) == 3 / 4
    # With questions, the block where the document ends is each prompt's own, and so are two more.
    asked = 5 * 4 * 22
    assert hit_rate(document_qa(documents=5, queries=4, question_tokens=1_000)) == (
        5 * 3 * 19 / asked
    )


def test_documents_in_turns_need_room_for_all_and_one_after_the_other_for_one() -> None:
    for order, rate in (("tile", 0.0), ("interleave", 3 / 4)):
        workload = document_qa(documents=5, queries=4, order=order)
        assert hit_rate(workload, pages=4 * 20 + 19) == rate
    assert hit_rate(document_qa(documents=5, queries=4), pages=5 * 20) == 3 / 4


def test_documents_in_any_order_are_each_asked_about_as_often() -> None:
    calls = list(document_qa(documents=7, queries=3, order="random").calls())
    firsts = [call.blocks[0] for call in calls]
    assert sorted(firsts.count(first) for first in set(firsts)) == [3] * 7
    assert firsts != sorted(firsts)


def test_scan_hits_nothing_in_a_cache_without_end() -> None:
    assert hit_rate(made("scan", 3)) == 0.0


def test_working_set_is_hit_from_the_second_pass_on_if_it_fits_and_never_if_not() -> None:
    sizes = {0.5: 2 / 3, 1.0: 2 / 3, 1.05: 0.0, 2.0: 0.0}
    for size, rate in sizes.items():
        # 10 blocks a prompt, 100 prompts a tier.
        one: TierSweep = made("tiers", 0, sets=(size,), passes=3)
        assert (one.prompt_tokens, one.prompts(size)) == (5_120, round(100 * size))
        assert hit_rate(one, pages=one.tier_blocks) == rate
    sweep: TierSweep = made("tiers", 0, sets=tuple(sizes), passes=3)
    prompts = sum(sweep.prompts(size) for size in sizes)
    expected = (50 + 100) * 2 / (prompts * 3)
    assert hit_rate(sweep, pages=sweep.tier_blocks) == pytest.approx(expected)


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_calls_are_chains_in_the_order_of_time_whose_lengths_fit_their_blocks(name: str) -> None:
    workload = made(name, 5)
    parents: dict[int, int] = {}
    last_s = 0.0
    for chat, call in enumerate(islice(workload.calls(), 1_500)):
        assert call.time_s >= last_s
        last_s = call.time_s
        assert call.chat == chat
        assert call.output_tokens >= 1
        size = workload.block_tokens
        assert (len(call.blocks) - 1) * size < call.input_tokens <= len(call.blocks) * size
        # An equal id means an equal prefix: each block has one and the same parent everywhere.
        for before, block in zip([-1, *call.blocks], call.blocks, strict=False):
            assert parents.setdefault(block, before) == before


@pytest.mark.parametrize("name", KINDS)
def test_same_seed_makes_the_same_calls_and_another_makes_others(name: str) -> None:
    first, again, other = (list(islice(made(name, seed).calls(), 300)) for seed in (4, 4, 5))
    assert first == again
    # What has nothing random in it is the same for all seeds.
    assert (first == other) == (name in ("document-qa", "tiers"))


def test_draws_are_those_that_python_promises() -> None:
    """Traces made by another version of this or of Python must be the same bytes."""
    draws = Draws(7, "x")
    assert [draws.below(1_000) for _ in range(6)] == [665, 769, 53, 681, 657, 593]


# --- chat -----------------------------------------------------------------------------------------


def test_chat_turn_begins_with_the_whole_blocks_of_the_turn_that_it_continues() -> None:
    calls = list(islice(CHAT.calls(), 2_000))
    continued = [call for call in calls if call.parent >= 0]
    assert len(continued) > 500
    branches = 0
    for call in continued:
        parent = calls[call.parent]
        whole = min(parent.input_tokens, call.input_tokens) // 512
        assert call.blocks[:whole] == parent.blocks[:whole]
        assert call.time_s > parent.time_s
        branches += call.turn != parent.turn + 1
    assert 0 < branches < len(continued) / 5
    assert {call.blocks[0] for call in calls if len(call.blocks) > 1} == {0}, "one root for all"


def test_chat_keeps_only_the_conversations_that_go_on() -> None:
    pool: ConversationPool[int] = ConversationPool(Draws(1, "pool"), 10.0)
    for number, (time_s, due) in enumerate(pool.arrivals()):
        if due is None:
            pool.add(time_s + 5.0, number)
        if number == 5_000:
            break
    # Each takes its second turn 5 s later, so 50 arrivals are between.
    assert len(pool) < 200


# --- agents ---------------------------------------------------------------------------------------


def test_agent_session_grows_is_cut_back_and_sends_sub_agents_with_prompts_of_their_own() -> None:
    variant = VARIANTS["truncated"]
    sessions = list(islice(Agents(2, variant, 1.0).sessions(), 40))
    cuts = sent = 0
    for session in sessions:
        root = (session.system_tokens + session.tool_tokens) // 64
        first = session.calls[0].call
        for before, after in zip(session.calls, session.calls[1:], strict=False):
            assert after.call.blocks[:root] == first.blocks[:root]
            whole = before.call.input_tokens // 64
            grown = after.call.blocks[:whole] == before.call.blocks[:whole]
            cuts += not grown
            assert grown or after.call.input_tokens <= variant.window_tokens
        for each in session.calls:
            assert each.think_s <= MOST_THINK_S
            for agent in each.sent:
                sent += 1
                assert agent.calls[0].call.blocks[0] != first.blocks[0]
                assert agent.calls[0].call.time_s >= each.call.time_s
        assert max(call.input_tokens for call in session.flat()) <= variant.window_tokens
    assert cuts > 10
    assert sent > 10


def test_agent_sessions_share_no_block_once_they_are_one_trace() -> None:
    agents = Agents(2, VARIANTS["cached"], 5.0)
    alone = [len(session.flat()) for session in islice(agents.sessions(), 3)]
    calls = list(islice(agents.calls(), 1_500))
    roots = {call.blocks[0] for call in calls}
    assert len(roots) > 5
    assert len(calls) > sum(alone)


# --- conversion and bounds ------------------------------------------------------------------------


def test_larger_blocks_are_equal_exactly_where_prefixes_are() -> None:
    calls = list(islice(made("system-prompts", 6).calls(), 400))
    prefixes: dict[int, tuple[int, ...]] = {}
    for call in calls:
        large = of_blocks(call, 16, 512)
        assert len(large) == -(-len(call.blocks) // 32)
        for at, block in enumerate(large):
            prefix = tuple(call.blocks[: (at + 1) * 32])
            assert prefixes.setdefault(block, prefix) == prefix


def test_smaller_blocks_are_parts_of_the_larger_ones() -> None:
    call = WorkloadCall(0.0, 1_040, 1, [7, 9, 11])
    small = of_blocks(call, 512, 16)
    assert len(small) == 65
    assert small[:32] == list(range(7 * 32, 8 * 32))
    assert small[64:] == [11 * 32]


def test_bounds_end_a_workload_by_requests_or_by_time() -> None:
    assert len(list(bounded(CHAT.calls(), WorkloadBounds(requests=17)))) == 17
    for call in bounded(CHAT.calls(), WorkloadBounds(duration_s=60.0)):
        assert call.time_s <= 60
    sessions = Agents(1, VARIANTS["cached"], 1.0).sessions()
    requests = [
        len(each.flat()) for each in bounded_sessions(sessions, WorkloadBounds(requests=500))
    ]
    assert sum(requests) >= 500 > sum(requests[:-1])


@pytest.mark.parametrize("score", [-4.0, -1.0, 0.0, 0.5, 3.0])
def test_quantile_curve_goes_through_its_points_and_stays_in_its_bounds(score: float) -> None:
    curve = QuantileCurve([(0.1, 10), (0.5, 100), (0.9, 200)], least=2, most=300)
    assert curve.at(0.0) == pytest.approx(100)
    assert curve.at(-1.2815515655446004) == pytest.approx(10)
    assert 2 <= curve.at(score) <= 300
    assert curve.at(score) <= curve.at(score + 0.1)

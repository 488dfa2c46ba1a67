"""What is stored of each step: the blocks that it fills, each once, while the table has them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from kvwarehouse_connectors.vllm.events import StoreEvents
from kvwarehouse_connectors.vllm.settings import Settings, read_settings
from kvwarehouse_connectors.vllm.staging import needed_bytes
from kvwarehouse_connectors.vllm.store_planner import VllmStorePlanner
from vllm_parts.requests import request, tokens
from vllm_parts.spaces import PAGE_BYTES, space_of
from vllm_parts.specs import chunk, config, full, state, window
from vllm_parts.steps import FakeMatcher, Running, step

HASH = 16
PLENTY = 1 << 40
MODELS = {
    "full": config(full(16), hash_tokens=HASH),
    "window": config(window(16, 40), hash_tokens=HASH),
    "full and window": config(full(16), window(16, 40), hash_tokens=HASH),
    "blocks of two sizes": config(window(16, 40), full(32), hash_tokens=HASH),
    "full and chunks": config(chunk(32, 64), full(16), hash_tokens=HASH),
    "everything": config(window(32, 70), full(48), chunk(16, 64), full(16), hash_tokens=HASH),
}
GROUPS = {name: cache_groups(made) for name, made in MODELS.items()}
STATES = cache_groups(config(state(48), full(16), hash_tokens=HASH))
NO_EVENTS = SimpleNamespace(kv_events_config=None)


def settings(**values: Any) -> Settings:
    return read_settings(
        {f"kvwarehouse.{name}": value for name, value in values.items()}, "kv_both"
    )


class Simulation:
    """A planner, and the requests whose steps it plans. Every order is judged as it is given."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        *,
        step_bytes: int = PLENTY,
        chosen: Settings | None = None,
    ) -> None:
        self.groups = groups
        self.running: dict[str, Running] = {}
        self.matcher = FakeMatcher()
        self.matcher.groups = groups
        self.step_bytes = step_bytes
        self.settings = chosen or settings()
        spaces = [space_of(place, group) for place, group in enumerate(groups)]
        events = StoreEvents(NO_EVENTS, groups, 1, {})
        self.planner = VllmStorePlanner(groups, spaces, self.settings, step_bytes, events)
        self.filled: set[tuple[int, bytes]] = set()
        """Blocks that were full, and in their table, when the step that filled them had run."""
        self.told: list[tuple[int, bytes]] = []

    def add(self, one: Running) -> Running:
        self.running[one.request.request_id] = one
        return one

    def run(self, **scheduled: int) -> list[PageRun]:
        """One step: so many tokens of each request."""
        for name, count in scheduled.items():
            self.running[name].schedule(count)
        tracked = {name: one.tracked for name, one in self.running.items()}
        runs = self.planner.plan(step(scheduled, self.running), tracked, self.matcher, 0)
        self._judge(runs, scheduled)
        for name, count in scheduled.items():
            one = self.running[name]
            self._fill(one, count)
            one.request.num_computed_tokens += count
        self.matcher.take(runs)
        return runs

    def _judge(self, runs: Sequence[PageRun], scheduled: dict[str, int]) -> None:
        legal: dict[tuple[int, bytes], set[int]] = {}
        for name, count in scheduled.items():
            one = self.running[name]
            for place, group in enumerate(self.groups):
                table = one.tables[group.index]
                full_blocks = (one.computed + count) // group.block_tokens
                known = one.tracked.keys.count(group.block_hashes)
                for block in range(min(full_blocks, known)):
                    key = one.tracked.keys.keys(block, block + 1, group.block_hashes)[0]
                    legal.setdefault((place, bytes(key)), set()).add(table[block])
        for run in runs:
            assert len(run.keys) == len(run.blocks) > 0
            for key, block in zip(run.keys, run.blocks, strict=True):
                assert block in legal[run.group, bytes(key)]
                assert block
                self.told.append((run.group, bytes(key)))
            if run.chained:
                assert (run.position == 0) == (run.parent is None)
        assert sum(len(run.keys) for run in runs) * PAGE_BYTES <= self.step_bytes

    def _fill(self, one: Running, count: int) -> None:
        for place, group in enumerate(self.groups):
            begin = one.computed // group.block_tokens
            end = (one.computed + count) // group.block_tokens
            for block in range(begin, min(end, one.tracked.keys.count(group.block_hashes))):
                if one.tables[group.index][block]:
                    key = one.tracked.keys.keys(block, block + 1, group.block_hashes)[0]
                    self.filled.add((place, bytes(key)))

    def of_rule(self, *rules: Rule) -> set[tuple[int, bytes]]:
        return {one for one in self.filled if self.groups[one[0]].rule in rules}


def asked(rng: random.Random, count: int, name: str = "a", **options: Any) -> Any:
    return request(tokens(rng, count), hash_tokens=HASH, name=name, **options)


def prefill(simulation: Simulation, one: Running, rng: random.Random, most: int) -> None:
    """In chunks of any size up to `most`."""
    name = one.request.request_id
    while one.computed < one.request.num_prompt_tokens:
        left = one.request.num_prompt_tokens - one.computed
        simulation.run(**{name: rng.randint(1, min(most, left))})


def decode(simulation: Simulation, one: Running, rng: random.Random, count: int) -> None:
    """Each token is known before the step that computes it."""
    for _ in range(count):
        one.request.append_output_token_ids(rng.randrange(1000))
        simulation.run(**{one.request.request_id: 1})


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(0, 1 << 32),
    st.integers(0, 400),
    st.integers(0, 60),
    st.sampled_from([7, 50, 1000]),
)
def test_every_block_is_stored_once_in_the_step_that_fills_it(
    model: str, chance: int, prompt: int, generated: int, most: int
) -> None:
    rng = random.Random(chance)
    simulation = Simulation(GROUPS[model])
    one = simulation.add(Running(asked(rng, prompt + 1), GROUPS[model]))
    prefill(simulation, one, rng, most)
    decode(simulation, one, rng, generated)
    assert set(simulation.told) == simulation.filled
    assert len(simulation.told) == len(set(simulation.told))


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(0, 1 << 32),
    st.integers(1, 5),
    st.sampled_from([50, 1000]),
)
def test_budget_of_a_step_is_kept_and_full_attention_is_caught_up_with(
    model: str, chance: int, pages: int, most: int
) -> None:
    rng = random.Random(chance)
    simulation = Simulation(GROUPS[model], step_bytes=pages * PAGE_BYTES)
    one = simulation.add(Running(asked(rng, 300), GROUPS[model]))
    prefill(simulation, one, rng, most)
    decode(simulation, one, rng, 120)
    told = set(simulation.told)
    behind = simulation.of_rule(Rule.PREFIX) - told
    assert len(behind) <= 1, "full attention was not caught up with"
    assert told <= simulation.filled


def found_tokens(simulation: Simulation, one: Running, limit: int) -> int:
    """The longest prefix, of at most `limit` tokens, of which every group has what is needed."""
    for end in range(limit, 0, -1):
        if all(
            end % group.block_tokens == 0
            and all(
                (place, bytes(key)) in simulation.matcher.stored
                for key in one.tracked.keys.keys(
                    group.first_needed(end), end // group.block_tokens, group.block_hashes
                )
            )
            for place, group in enumerate(simulation.groups)
        ):
            return end
    return 0


def whole(groups: Sequence[CacheGroup], count: int) -> int:
    """Of so many tokens, those in whole blocks of all groups."""
    return count - count % math.lcm(*(group.block_tokens for group in groups))


@given(st.sampled_from(sorted(MODELS)), st.integers(0, 1 << 32), st.integers(1, 600))
def test_prompt_of_one_step_is_found_whole_with_the_memory_that_is_needed(
    model: str, chance: int, prompt: int
) -> None:
    """As on a prefill node, which computes one token and has no later step."""
    groups = GROUPS[model]
    needed = needed_bytes(groups, [PAGE_BYTES] * len(groups), prompt)
    simulation = Simulation(groups, step_bytes=needed // 2)
    one = simulation.add(Running(asked(random.Random(chance), prompt), groups))
    simulation.run(a=prompt)
    assert found_tokens(simulation, one, prompt) == whole(groups, prompt)
    # Who sends it again has its last token computed.
    again = whole(groups, prompt - 1)
    assert found_tokens(simulation, one, prompt - 1) == again


@pytest.mark.parametrize("model", ["full and window", "blocks of two sizes", "full and chunks"])
def test_end_of_a_prompt_larger_than_the_budget_is_found_when_full_attention_has_caught_up(
    model: str, rng: random.Random
) -> None:
    """A hybrid model at a GPU's sizes, where a step filled many times the budget: full attention
    took all of it, the window's blocks at the prompt's end were gone, and no prompt was ever a
    hit."""
    groups = GROUPS[model]
    simulation = Simulation(groups, step_bytes=8 * PAGE_BYTES)
    one = simulation.add(Running(asked(rng, 961), groups))
    simulation.run(a=961)
    decode(simulation, one, rng, 60)
    assert found_tokens(simulation, one, 961) == 960


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(0, 1 << 32),
    st.integers(1, 40),
    st.integers(0, 30),
)
def test_every_full_block_is_stored_or_counted_as_dropped(
    model: str, chance: int, pages: int, generated: int
) -> None:
    rng = random.Random(chance)
    simulation = Simulation(GROUPS[model], step_bytes=pages * PAGE_BYTES)
    one = simulation.add(Running(asked(rng, 300), GROUPS[model]))
    prefill(simulation, one, rng, 300)
    decode(simulation, one, rng, generated)
    simulation.planner.ended(one.tracked)
    assert simulation.planner.take_dropped() == len(simulation.filled - set(simulation.told))
    assert simulation.planner.take_dropped() == 0


@given(st.sampled_from(sorted(MODELS)), st.integers(0, 1 << 32))
def test_what_is_stored_already_is_not_stored_again(model: str, chance: int) -> None:
    """Some blocks of the prompt are there before, as after a load or from another engine."""
    rng = random.Random(chance)
    groups = GROUPS[model]
    simulation = Simulation(groups)
    one = simulation.add(Running(asked(rng, 300), groups))
    for place, group in enumerate(groups):
        count = one.tracked.keys.count(group.block_hashes)
        for key in one.tracked.keys.keys(0, count, group.block_hashes):
            if rng.random() < 0.5:
                simulation.matcher.stored.add((place, bytes(key)))
    before = set(simulation.matcher.stored)
    prefill(simulation, one, rng, 100)
    assert not before & set(simulation.told)
    assert set(simulation.told) == simulation.filled - before


@given(st.sampled_from(sorted(MODELS)), st.integers(0, 1 << 32), st.integers(1, 3))
def test_block_whose_last_token_is_not_known_yet_is_stored_when_it_is(
    model: str, chance: int, lag: int
) -> None:
    """Asynchronous scheduling: steps run ahead of the tokens that they sample."""
    rng = random.Random(chance)
    groups = GROUPS[model]
    simulation = Simulation(groups)
    one = simulation.add(Running(asked(rng, 40), groups))
    prefill(simulation, one, rng, 100)
    late: list[int] = []
    for _ in range(100):
        late.append(rng.randrange(1000))
        if len(late) > lag:
            one.request.append_output_token_ids(late.pop(0))
        simulation.run(a=1)
    one.request.append_output_token_ids(late)
    simulation.run(a=1)
    every = {
        (place, bytes(key))
        for place, group in enumerate(groups)
        if group.rule is Rule.PREFIX
        for key in one.tracked.keys.keys(
            0, one.tracked.keys.count(group.block_hashes), group.block_hashes
        )
    }
    assert every <= set(simulation.told)
    assert len(simulation.told) == len(set(simulation.told))


@pytest.mark.parametrize("model", sorted(MODELS))
def test_generated_tokens_are_left_out_when_told_so(model: str, rng: random.Random) -> None:
    groups = GROUPS[model]
    simulation = Simulation(groups, chosen=settings(store_generated=False))
    one = simulation.add(Running(asked(rng, 100), groups))
    prefill(simulation, one, rng, 1000)
    told = len(simulation.told)
    assert told > 0
    decode(simulation, one, rng, 100)
    assert len(simulation.told) == told


def test_preempted_request_stores_what_it_had_not_stored_before(rng: random.Random) -> None:
    groups = GROUPS["full"]
    simulation = Simulation(groups)
    one = simulation.add(Running(asked(rng, 160), groups))
    simulation.run(a=90)
    one.preempted()
    simulation.run(a=160)
    assert len(simulation.told) == 10
    assert simulation.filled == set(simulation.told)


@pytest.mark.parametrize("change", ["stores", "epoch"])
def test_request_that_may_not_store_stores_nothing(change: str, rng: random.Random) -> None:
    simulation = Simulation(GROUPS["full"])
    one = simulation.add(Running(asked(rng, 160), GROUPS["full"]))
    if change == "stores":
        one.tracked.stores = False
    else:
        one.tracked.epoch = 1
    assert simulation.run(a=160) == []


def test_requests_of_one_step_share_its_budget(rng: random.Random) -> None:
    groups = GROUPS["full"]
    simulation = Simulation(groups, step_bytes=12 * PAGE_BYTES)
    for name in ("a", "b"):
        simulation.add(Running(asked(rng, 160, name=name), groups))
    runs = simulation.run(a=160, b=160)
    assert [len(run.keys) for run in runs] == [10, 2]
    for name in ("a", "b"):
        simulation.running[name].request.append_output_token_ids(1)
    (rest,) = simulation.run(a=1, b=1)
    assert len(rest.keys) == 8
    assert rest.position == 2


def test_block_that_two_requests_of_a_step_fill_is_stored_once(rng: random.Random) -> None:
    groups = GROUPS["full and window"]
    simulation = Simulation(groups)
    ids = tokens(rng, 160)
    for name in ("a", "b"):
        simulation.add(Running(request(ids, hash_tokens=HASH, name=name), groups))
    simulation.run(a=160, b=160)
    assert len(simulation.told) == len(set(simulation.told))
    assert set(simulation.told) == simulation.filled


def test_block_that_another_request_had_no_room_for_is_stored_by_who_else_has_it(
    rng: random.Random,
) -> None:
    """The first one ends before it has caught up. Without those blocks, all that the second one
    stores has no parent: it is refused, or never found."""
    groups = GROUPS["full"]
    simulation = Simulation(groups, step_bytes=2 * PAGE_BYTES)
    ids = tokens(rng, 160)
    for name in ("a", "b"):
        simulation.add(Running(request(ids, hash_tokens=HASH, name=name), groups))
    simulation.run(a=160, b=160)
    del simulation.running["a"]
    decode(simulation, simulation.running["b"], rng, 40)
    assert simulation.filled - set(simulation.told) == set()


def test_steps_that_fill_no_block_ask_for_nothing(rng: random.Random) -> None:
    """Most steps of a decoding request: its table is not even looked at."""
    groups = GROUPS["full and window"]
    simulation = Simulation(groups)
    one = simulation.add(Running(asked(rng, 160), groups))
    simulation.run(a=160)
    looked = []
    for _ in range(HASH - 1):
        one.request.append_output_token_ids(1)
        one.schedule(1)
        made = step({"a": 1}, simulation.running)
        resolve = made.kv_connector_block_state.resolve_block_ids
        made.kv_connector_block_state.resolve_block_ids = lambda name, resolve=resolve: (
            looked.append(name) or resolve(name)
        )
        simulation.planner.plan(made, {"a": one.tracked}, simulation.matcher, 0)
        one.request.num_computed_tokens += 1
    assert looked == []


def offered(simulation: Simulation, one: Running, *entries: tuple[int, int, int]) -> list[PageRun]:
    made = step({}, simulation.running, {"a": list(entries)})
    return simulation.planner.plan(made, {"a": one.tracked}, simulation.matcher, 0)


def test_states_are_stored_when_vllm_offers_them_at_a_boundary(rng: random.Random) -> None:
    simulation = Simulation(STATES)
    one = simulation.add(Running(asked(rng, 160), STATES))
    (place,) = [place for place, group in enumerate(STATES) if group.rule is Rule.STATE]
    index = STATES[place].index
    (run,) = offered(simulation, one, (index, 77, 96))
    assert (run.group, list(run.blocks), run.chained) == (place, [77], False)
    assert [bytes(key) for key in run.keys] == [bytes(one.request.block_hashes[5])]
    simulation.matcher.take([run])
    assert offered(simulation, one, (index, 78, 96)) == []


@pytest.mark.parametrize(
    ("what", "entry"),
    [
        ("inside a block", (0, 77, 100)),
        ("beyond what is known", (0, 77, 192)),
        ("a block of nothing", (0, 0, 96)),
        ("another group", (1, 77, 96)),
        ("no group at all", (9, 77, 96)),
    ],
)
def test_state_without_a_key_of_its_own_is_not_stored(
    what: str, entry: tuple[int, int, int], rng: random.Random
) -> None:
    simulation = Simulation(STATES)
    one = simulation.add(Running(asked(rng, 160), STATES))
    assert STATES[1].index == 0
    assert offered(simulation, one, entry) == []


@pytest.mark.parametrize(
    ("role", "params", "wanted"),
    [
        ("kv_both", None, False),
        ("kv_both", {"kvwarehouse.handoff": True}, True),
        ("kv_both", {"kvwarehouse.handoff": "yes"}, False),
        ("kv_producer", None, True),
        ("kv_producer", {"kvwarehouse.handoff": False}, True),
    ],
)
def test_producers_and_those_who_are_asked_say_what_they_stored(
    role: str, params: dict[str, Any] | None, wanted: bool, rng: random.Random
) -> None:
    simulation = Simulation(GROUPS["full"], chosen=read_settings({}, role))
    one = Running(asked(rng, 160, params=params), GROUPS["full"])
    assert simulation.planner.handoff_wanted(one.tracked) == wanted
    one.tracked.stores = False
    assert not simulation.planner.handoff_wanted(one.tracked)


@given(st.sampled_from(sorted(MODELS)), st.integers(0, 1 << 32), st.integers(1, 400))
def test_hand_off_promises_no_more_than_was_given_to_be_stored(
    model: str, chance: int, prompt: int
) -> None:
    rng = random.Random(chance)
    groups = GROUPS[model]
    simulation = Simulation(groups)
    one = simulation.add(Running(asked(rng, prompt), groups))
    prefill(simulation, one, rng, 1000)
    promised = simulation.planner.stored_tokens(one.tracked)
    assert promised == min(prompt // group.block_tokens * group.block_tokens for group in groups)


def test_chain_that_cannot_be_caught_up_with_is_stored_from_its_first_block_on(
    rng: random.Random,
) -> None:
    """TensorRT-LLM's windows: a block without all blocks before it is never found."""
    groups = (CacheGroup(0, Rule.PREFIX, 16, 40, HASH, ("layer",)),)
    simulation = Simulation(groups, step_bytes=4 * PAGE_BYTES)
    one = simulation.add(Running(asked(rng, 160), groups))
    (run,) = simulation.run(a=160)
    assert (run.position, len(run.keys)) == (0, 4)
    assert simulation.planner.take_dropped() == 6
    assert one.tracked.considered == [10]


def test_states_keep_to_the_budget_and_what_is_left_out_of_them_is_counted(
    rng: random.Random,
) -> None:
    """vLLM offers a state once."""
    simulation = Simulation(STATES, step_bytes=PAGE_BYTES)
    one = simulation.add(Running(asked(rng, 160), STATES))
    index = next(group.index for group in STATES if group.rule is Rule.STATE)
    (run,) = offered(simulation, one, (index, 77, 48), (index, 78, 96))
    assert list(run.blocks) == [77]
    assert simulation.planner.take_dropped() == 1


def test_model_of_states_alone_hands_nothing_over(rng: random.Random) -> None:
    groups = cache_groups(config(state(48), hash_tokens=HASH))
    simulation = Simulation(groups, chosen=read_settings({}, "kv_producer"))
    one = simulation.add(Running(asked(rng, 160), groups))
    prefill(simulation, one, rng, 48)
    assert simulation.planner.handoff_wanted(one.tracked)
    assert simulation.planner.stored_tokens(one.tracked) == 0

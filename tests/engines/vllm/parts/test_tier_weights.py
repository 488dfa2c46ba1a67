"""Weights that change above the tier: the model is a matrix, and each chunk is filled with the
number of the weights that computed it. vLLM's tiering manager and both halves of what watches the
weights are real; the test is vLLM's scheduler, its worker and its own cache."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from torch import nn
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.live_weights import LiveWeights, WeightsSample
from kvwarehouse_connectors.vllm.weights_watch import WeightsNews
from kvwarehouse_connectors.vllm_tier import WarehouseOffloadingConnector
from kvwarehouse_connectors.vllm_tier.steps import StepVerdict, StepWatch, WatchedStep
from vllm_parts.tiering import STEP, Manager
from vllm_tier_model.primary import keys

_MIXED = 255
_CHUNKS = 3
_PROMPTS = [keys("prompt", number, count=_CHUNKS) for number in range(4)]


@dataclass
class Kv:
    """Of a prompt in vLLM's own cache. weights: that computed it; None: its step has not run."""

    weights: int | None = None


@dataclass
class Work:
    """Of one step. copies: into rows, of what earlier steps computed."""

    step: WatchedStep
    computes: list[tuple[Kv, Kv | None]] = field(default_factory=list)
    """What is computed, on what."""
    loads: list[tuple[Kv, list[int], list[bool], set[int]]] = field(default_factory=list)
    """Into what; rows; whether they were the warehouse's; the weights since they were asked for."""
    stores: list[tuple[ReqContext, set[bytes], list[int], Kv]] = field(default_factory=list)


class Life:
    """An engine from start to end. ahead: steps that are made before the first of them runs, and
    results that wait to be taken."""

    def __init__(self, address: str, salt: str, weights: int, ahead: int = 0) -> None:
        self.weights, self.ahead = weights, ahead
        self.manager = Manager(address, salt=salt, weights=f"w{weights}").connected()
        self.link = self.manager.link
        self.model = nn.Linear(64, 64)
        self.change(weights)
        self.watch = StepWatch(LiveWeights(self.model))
        self.cache = SimpleNamespace(
            block_pool=SimpleNamespace(cached_block_hash_to_block=object())
        )
        self.link.epochs.watch(self.cache)
        self.cached: dict[int, Kv] = {}
        self.hits = 0
        self._names = 0
        self._work: list[Work] = []
        self._next = Work(WatchedStep(None, 0, 0, 0))
        self._made: deque[Work] = deque()
        self._copies: list[tuple[ReqContext, set[bytes], list[int], Kv]] = []
        self._ran: deque[tuple[StepVerdict, list[tuple[ReqContext, set[bytes]]]]] = deque()
        self._stale: set[str] = set()
        self._asked: list[set[int]] = []

    # -- what people do ----------------------------------------------------------------------------

    def change(self, weights: int) -> None:
        self.weights = weights
        nn.init.constant_(self.model.weight, weights)

    def reset(self, *, cache: bool = True, connector: bool = True) -> None:
        """cache: vLLM could reset its own, which holds no blocks of requests then."""
        if cache:
            self.cache.block_pool.cached_block_hash_to_block = object()
            self.cached.clear()
        if connector:
            # vLLM forgets its copies between the cache and the CPU tier, which end all the same.
            self._stale |= {one[0].req_id for one in self._open_stores()}
            self.manager.reset()
            self.link.was_reset()

    def ask(self, prompt: int, *, longer: int | None = None) -> bool:
        """As vLLM would: its own cache first, the tiers next, the rest is computed. longer: a
        prompt that begins with it. Whether all came from the warehouse."""
        self._names += 1
        context = self.manager.begin(f"r{self._names}")
        kv, found = self.cached.get(prompt), False
        if kv is None:
            kv, found = self._from_tiers(context, prompt) or (None, False)
        if kv is None:
            kv = Kv()
            self._next.computes.append((kv, None))
        self.cached[prompt] = kv
        self._store(context, prompt, kv)
        if longer is not None and longer not in self.cached:
            more = self.cached[longer] = Kv()
            self._next.computes.append((more, kv))
            self._store(context, longer, more)
        self.step()
        self.manager.vllm.on_request_finished(context)
        return found

    def settle(self) -> None:
        """Until nothing is under way."""
        self.step(ahead=0)

        def idle() -> bool:
            self.step(ahead=0)
            return not (self.manager.vllm._jobs or self._open_stores())

        eventually(idle, "an engine with nothing to do")

    def evict(self) -> None:
        """All of vLLM's CPU tier."""
        self.settle()
        self.manager.forget()

    def close(self) -> None:
        self.settle()
        self.manager.vllm.shutdown()

    # -- vLLM's scheduler and worker ---------------------------------------------------------------

    def step(self, ahead: int | None = None) -> None:
        """Makes one, and runs and ends those that are due."""
        link, work = self.link, self._next
        link.step_begins()
        self.manager.vllm.on_schedule_end(STEP)
        idle = not (work.computes or work.loads or work.stores or self.manager.tier.loading)
        work.step = WatchedStep(None, link.step, link.epochs.epoch, link.epochs.resets, idle)
        self._next = Work(work.step)
        self._made.append(work)
        due = self.ahead if ahead is None else ahead
        while len(self._made) > due:
            self._run(self._made.popleft())
        while len(self._ran) > due:
            self._take()

    def _run(self, work: Work) -> None:
        self.watch.step(work.step)
        for asked in self._asked:
            asked.add(self.weights)
        done = []
        for context, named, rows, kv in self._copies:
            self.manager.rows[rows] = kv.weights
            done.append((context, named))
        self._copies = []
        for kv, rows, ours, asked in work.loads:
            values = {int(value) for row in rows for value in set(self.manager.rows[row].tolist())}
            for row, own in zip(rows, ours, strict=True):
                value = int(self.manager.rows[row][0])
                assert not own or value in asked, f"KV of {value} for weights {asked}"
            kv.weights = values.pop() if len(values) == 1 else _MIXED
        for kv, on in work.computes:
            kv.weights = self.weights if on is None or on.weights == self.weights else _MIXED
        self._copies += work.stores
        self._ran.append((self.watch.verdict(None), done))

    def _take(self) -> None:
        verdict, done = self._ran.popleft()
        self.link.take(verdict)
        for context, named in done:
            if context.req_id not in self._stale:
                self.manager.vllm.complete_store(named, context)

    def _store(self, context: ReqContext, prompt: int, kv: Kv) -> None:
        prepared = self.manager.vllm.prepare_store(_PROMPTS[prompt], context)
        if prepared is not None and prepared.keys_to_store:
            rows = [int(row) for row in prepared.store_spec.chunk_ids]
            self._next.stores.append((context, set(prepared.keys_to_store), rows, kv))

    def _open_stores(self) -> list[tuple[Any, ...]]:
        made = [store for work in (*self._made, self._next) for store in work.stores]
        return [*made, *self._copies, *(one for _, done in self._ran for one in done)]

    def _from_tiers(self, context: ReqContext, prompt: int) -> tuple[Kv, bool] | None:
        """What comes from vLLM's CPU tier, and whether all of it is the warehouse's."""
        named, vllm = _PROMPTS[prompt], self.manager.vllm
        own = [vllm.primary_tier.lookup(one, context) is not LookupResult.MISS for one in named]
        asked: set[int] = set()
        self._asked.append(asked)

        def known() -> list[LookupResult] | None:
            answers = [vllm.lookup(one, context) for one in named]
            if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers):
                self.step()
                return None
            return answers

        answers = eventually(known, "an end of asking again")
        self._asked.remove(asked)
        if set(answers) != {LookupResult.HIT}:
            return None
        rows = [int(row) for row in vllm.prepare_load(named, context).chunk_ids]
        vllm.complete_load(named, context)
        kv, ours = Kv(), [not mine for mine in own]
        self._next.loads.append((kv, rows, ours, asked | {self.weights}))
        self.hits += all(ours)
        return kv, all(ours)


Begin = Callable[..., Life]


@pytest.fixture
def begin(shared: Serving, request: pytest.FixtureRequest) -> Iterator[Begin]:
    """begin(weights, ahead=0): an engine after the one before, at the same warehouse."""
    lives: list[Life] = []

    def begun(weights: int, ahead: int = 0) -> Life:
        if lives:
            lives.pop().close()
        lives.append(Life(shared.address, request.node.nodeid[:200], weights, ahead))
        return lives[-1]

    yield begun
    for life in lives:
        life.close()


AHEAD = pytest.mark.parametrize("ahead", [0, 1, 2])


@AHEAD
def test_other_weights_and_a_reset_of_the_connector_cost_one_prompt(
    begin: Begin, ahead: int
) -> None:
    life = begin(0, ahead)
    life.ask(0)
    life.settle()
    life.change(1)
    life.reset()
    assert not life.ask(0)
    life.evict()
    life.reset(connector=False)
    assert life.ask(0), "what it stores from now on is loaded"
    assert begin(0).ask(0)


@AHEAD
def test_other_weights_end_loads_and_stores_until_a_reset_of_both_caches(
    begin: Begin, ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    life = begin(0, ahead)
    life.ask(0)
    life.evict()
    life.reset(connector=False)
    life.change(1)
    assert not life.ask(0), "the step that sees it has loaded it"
    totals = life.manager.tier._core.totals
    life.ask(1)
    for incomplete in ({"connector": False}, {"cache": False}):
        life.evict()
        life.reset(**incomplete)
        assert not life.ask(2)
    life.settle()
    after = life.manager.tier._core.totals
    assert after["stored_chunks"] == totals["stored_chunks"]
    assert after["missed.other_weights"] == _CHUNKS
    assert caplog.text.count("until that cache is reset") == 1, "said once, not with each step"
    assert "reset_connector=True" in caplog.text
    life.reset()
    life.ask(3)
    life.evict()
    life.reset(connector=False)
    assert life.ask(3)
    later = begin(0)
    assert later.ask(0)
    assert not any(later.ask(prompt) for prompt in (1, 2, 3))


def test_weights_that_come_before_the_first_prompt_are_kept_apart_without_a_reset(
    begin: Begin,
) -> None:
    """As a trainer's first update does."""
    begin(0).ask(0)
    life = begin(0)
    life.change(1)
    assert not life.ask(0)
    life.ask(1)
    life.evict()
    life.reset(connector=False)
    assert life.ask(1)
    later = begin(0)
    assert later.ask(0)
    assert not later.ask(1)


def test_weights_that_cannot_be_read_are_as_bad_as_others(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(self: LiveWeights) -> None:
        raise RuntimeError("the device is gone")

    life = begin(0)
    life.ask(0)
    life.evict()
    life.reset(connector=False)
    with monkeypatch.context() as patched:
        patched.setattr(LiveWeights, "sample", lost)
        for _ in range(2):
            life.cached.clear()
            assert not life.ask(0)
    life.ask(1)
    life.settle()
    assert caplog.text.count("could not be read") == 1
    life.reset()
    life.ask(2)
    life.evict()
    life.reset(connector=False)
    assert life.ask(2)


def test_verdict_is_that_of_all_ranks() -> None:
    step = WatchedStep(None, 4, 1, 1)
    models = [nn.Linear(8, 8) for _ in range(2)]
    ranks = [StepWatch(LiveWeights(model)) for model in models]
    for rank in ranks:
        rank.step(step)
    ranks[0].step(WatchedStep(None, 5, 1, 1))
    one, other = (rank.verdict(None) for rank in ranks)
    together = one.aggregate(other)
    assert (together.judged, together.ranks, together.news) == (4, 2, WeightsNews())
    nn.init.constant_(models[1].weight, 1)
    for rank in ranks:
        rank.step(WatchedStep(None, 6, 1, 1))
    told = [rank.verdict(None) for rank in ranks]
    assert told[0].news == WeightsNews()
    for together in (told[0].aggregate(told[1]), told[1].aggregate(told[0])):
        assert together == StepVerdict(None, 6, WeightsNews(2, 1), 2)


def test_step_that_does_nothing_has_the_verdict_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While an engine sleeps its weights cannot be read."""
    watch = StepWatch(LiveWeights(nn.Linear(8, 8)))
    sample = LiveWeights.sample
    read: list[None] = []
    monkeypatch.setattr(LiveWeights, "sample", lambda self: (read.append(None), sample(self))[1])
    watch.step(WatchedStep(None, 0, 0, 0, idle=True))
    assert (watch.verdict(None).judged, read) == (0, [])
    watch.step(WatchedStep(None, 1, 0, 0))
    monkeypatch.setattr(WeightsSample, "ready", False)
    watch.step(WatchedStep(None, 2, 0, 0))
    watch.step(WatchedStep(None, 3, 0, 0, idle=True))
    assert (watch.verdict(None).judged, len(read)) == (1, 2), "the device has not come to step 2"
    monkeypatch.undo()
    assert watch.verdict(None).judged == 3


@pytest.mark.parametrize(
    ("tokens", "load_jobs", "store_jobs", "loading", "idle"),
    [
        (0, {}, {}, False, True),
        (1, {}, {}, False, False),
        (0, {7: "job"}, {}, False, False),
        (0, {}, {7: "job"}, False, False),
        (0, {}, {}, True, False),
    ],
)
def test_step_is_idle_where_nothing_is_computed_loaded_or_stored(
    tokens: int,
    load_jobs: dict[int, str],
    store_jobs: dict[int, str],
    loading: bool,
    idle: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = SimpleNamespace(load_jobs=load_jobs, store_jobs=store_jobs)
    monkeypatch.setattr(OffloadingConnector, "build_connector_meta", lambda self, step: work)
    connector = WarehouseOffloadingConnector.__new__(WarehouseOffloadingConnector)
    connector._link = SimpleNamespace(
        step_begins=lambda: None,
        step=3,
        epochs=SimpleNamespace(epoch=1, resets=2),
        tiers=[SimpleNamespace(loading=loading)],
    )
    step = SimpleNamespace(total_num_scheduled_tokens=tokens)
    assert connector.build_connector_meta(step) == WatchedStep(work, 3, 1, 2, idle)


def test_vllms_own_part_of_a_verdict_is_its_own() -> None:
    parts = [OffloadingWorkerMetadata({job: 1}) for job in (3, 4)]
    one, other, none = (StepVerdict(part, 0, WeightsNews()) for part in (*parts, None))
    assert one.aggregate(other).aggregate(none).vllm.completed_jobs == {3: 1, 4: 1}
    assert none.aggregate(one).vllm == parts[0]
    assert none.aggregate(none).vllm is None


def test_nothing_is_known_while_a_rank_says_nothing(begin: Begin) -> None:
    life = begin(0)
    life.link._ranks = 2
    life.ask(0)
    life.step()
    assert life.manager.tier._core._held_stores
    life.link._ranks = 1
    life.step()
    assert not life.manager.tier._core._held_stores


def test_no_order_of_changes_resets_and_restarts_serves_kv_of_other_weights(
    begin: Begin, rng: random.Random
) -> None:
    hits = 0
    for _ in range(60):
        life = begin(rng.randrange(2), rng.randrange(3))
        for _ in range(24):
            act = rng.randrange(14)
            if act == 0:
                life.change(rng.randrange(3))
            elif act == 1:
                life.reset()
            elif act == 2:
                life.reset(connector=False)
            elif act == 3:
                life.reset(cache=False)
            elif act == 4:
                life.evict()
            elif act == 5:
                life.step()
            elif act == 6:
                life.settle()
                life.reset(connector=False)
                life.evict()
            else:
                prompt, longer = rng.sample(range(len(_PROMPTS)), 2)
                life.ask(prompt, longer=longer if rng.randrange(2) else None)
        hits += life.hits
    assert hits, "nothing was ever loaded: the test proves nothing"

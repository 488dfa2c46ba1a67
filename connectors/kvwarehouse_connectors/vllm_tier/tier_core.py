"""The warehouse as vLLM's tiering manager asks for it: lookups, loads and stores of chunks, and
what becomes of a request. Nothing here waits, but `drain` and `close`; nothing copies in vLLM's
thread.

The engine's weights may change while it runs. So a store begins, and a load is reported, when the
weights are known to have been right up to the engine's step that the job names. Where they were
not, the job fails: the store was never begun, and vLLM has let nobody read the load's rows.

A lookup reads shared memory. What is on NVMe is fetched behind vLLM's back, and the lookup says to
ask again meanwhile. A chunk that did not come once is a miss for its request from then on: asked
again and again it would hold the request up for ever.

Not thread-safe: vLLM's scheduler calls from one thread. The jobs' threads see jobs alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.page_store import ReasonCounts
from kvwarehouse_connectors.vllm_tier.chunks import RowGroup, Rows, TierChunk, group_of, name_of
from kvwarehouse_connectors.vllm_tier.jobs import Job, JobOutcome, Jobs
from kvwarehouse_connectors.vllm_tier.page_store import NEAR, TierPages
from kvwarehouse_connectors.vllm_tier.settings import TierSettings

_log = logging.getLogger(__name__)

_LOAD_THREADS = 2
_FETCH_THREADS = 2
# vLLM has at most one load of a request under way, and a store or two: more than these wait only
# behind a daemon that does not keep up.
_MOST_WAITING = 256
_TWIST_BYTES = 64
# At the engine's start only: it is then not serving anybody.
_START_WAIT_S = 3.0


class LookupAnswer(Enum):
    HIT = "hit"
    COMING = "coming"
    MISS = "miss"


@dataclass(frozen=True)
class RequestFacts:
    """twist: of what the request's block hashes leave out, such as the weights of its adapter."""

    twist: bytes = b""
    loads: bool = True
    stores: bool = True


@dataclass
class _Request:
    facts: RequestFacts
    coming: dict[bytes, float] = field(default_factory=dict)
    """Keys of chunks that are fetched, or that the step's end will have fetched; and until when the
    request waits for them, a moment of time.monotonic()."""
    to_fetch: list[TierChunk] = field(default_factory=list)
    fetched: set[bytes] = field(default_factory=set)
    """Keys of chunks that were fetched: one that left again is not fetched twice."""
    failed: set[bytes] = field(default_factory=set)
    """Keys of chunks that did not come."""
    pins: list[kvw.Pins] = field(default_factory=list)
    """Of what was fetched, until it is loaded."""

    def release(self) -> None:
        _release(self.pins)


class TierCore:
    """rows: vLLM's CPU tier. Serves nothing until it is told of the groups. A daemon need not be
    there. Raises UsageError where the address is bad."""

    def __init__(self, settings: TierSettings, rows: Rows) -> None:
        self._settings = settings
        self._rows = rows
        self._groups: Mapping[int, RowGroup] = {}
        self._requests: dict[str, _Request] = {}
        self._epoch = 0
        self._epoch_twist = b""
        self._known_step = -1
        self._held_stores: list[Job] = []
        self._held_loads: list[JobOutcome] = []
        self._closed = False
        self._counts = ReasonCounts("chunks")
        self._connection = DaemonConnection(
            settings.address,
            ConnectionOptions(verify=settings.verify, read_only=not settings.stores),
        )
        self._pages = TierPages(self._connection)
        self._loads = Jobs("load", _LOAD_THREADS, _MOST_WAITING, self._load)
        self._stores = Jobs("store", 1, _MOST_WAITING, self._store)
        self._fetches = Jobs("fetch", _FETCH_THREADS, _MOST_WAITING, self._pages.fetch)

    def serve(self, groups: Mapping[int, RowGroup]) -> None:
        """groups: by their number in vLLM's keys. Blocks for a daemon that is there, a moment."""
        for group in groups.values():
            try:
                self._connection.wait_namespace(group.space, _START_WAIT_S)
            except kvw.UsageError:
                break  # refused, and said so in the log: the engine computes
        self._groups = groups

    @property
    def totals(self) -> dict[str, int]:
        """By name, as metrics.COUNTERS has them; `missed.REASON` and `dropped.REASON` say why."""
        return self._counts.totals()

    # -- a request ---------------------------------------------------------------------------------

    def begin(self, request_id: str, facts: RequestFacts) -> None:
        self.end(request_id)
        twist = (self._epoch_twist + facts.twist)[:_TWIST_BYTES]
        self._requests[request_id] = _Request(RequestFacts(twist, facts.loads, facts.stores))

    def distrust(self, request_id: str) -> None:
        """What its keys stand for is not known any more: it neither loads nor stores."""
        request = self._requests.get(request_id)
        if request is not None:
            request.to_fetch.clear()
            request.facts = RequestFacts(loads=False, stores=False)

    def end(self, request_id: str) -> None:
        """Its jobs go on."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.release()

    def lookup(self, request_id: str, key: bytes) -> LookupAnswer:
        request = self._requests.get(request_id)
        group = self._groups.get(group_of(key))
        if request is None or group is None or self._closed or not self._settings.loads:
            return LookupAnswer.MISS
        if not request.facts.loads or key in request.failed:
            return LookupAnswer.MISS
        chunk = TierChunk(key, name_of(key, request.facts.twist), group)
        tier = self._pages.tier(chunk, counted=key not in request.coming)
        if tier in NEAR:
            return LookupAnswer.HIT
        if key in request.coming:
            in_time = time.monotonic() < request.coming[key]
            return LookupAnswer.COMING if in_time else LookupAnswer.MISS
        if tier == kvw.Tier.MISSING or key in request.fetched or not self._pages.alive:
            return LookupAnswer.MISS
        request.coming[key] = self._load_until()
        request.to_fetch.append(chunk)
        return LookupAnswer.COMING

    def step_ends(self) -> None:
        """Begins to fetch what the step's lookups found on NVMe or in the remote store."""
        self._take_fetched()
        for request_id, request in self._requests.items():
            if request.to_fetch:
                chunks, request.to_fetch = request.to_fetch, []
                self._fetches.submit(Job(-1, request_id, chunks, self._load_until()))

    # -- jobs --------------------------------------------------------------------------------------

    def load(
        self, number: int, request_id: str, rows: Iterable[tuple[bytes, int]], step: int
    ) -> None:
        """rows: of each key. step: that begins it."""
        job = Job(number, request_id, [], self._load_until(), step, self._epoch)
        request = self._requests.get(request_id)
        if request is None or not request.facts.loads:
            self._loads.refuse(job)
            return
        try:
            job.chunks = self._chunks(request, rows)
            job.pins += self._pages.hold(job.chunks)
        except Exception:  # noqa: BLE001 - vLLM's edge: it waits for this job
            _log.exception("kvwarehouse: a load could not be begun")
            self._loads.refuse(job)
            return
        self._loads.submit(job)

    def store(
        self,
        number: int,
        request_id: str,
        rows: Iterable[tuple[bytes, int]],
        position: Callable[[bytes], int | None],
        step: int,
    ) -> None:
        """rows: of each key, in any order. position: of a key in its prompt, where it is known.
        step: the last that may have computed any of it."""
        until_s = time.monotonic() + self._settings.store_timeout_s
        job = Job(number, request_id, [], until_s, step, self._epoch)
        request = self._requests.get(request_id)
        if request is None or not (request.facts.stores and self._settings.stores):
            self._stores.refuse(job)
            return
        try:
            chunks = self._chunks(request, rows)
            # What is stored last leaves last: without its begin a prompt's end is of no use.
            job.chunks = sorted(chunks, key=lambda chunk: -(position(chunk.key) or 0))
        except Exception:  # noqa: BLE001 - vLLM's edge: it keeps the rows until it hears of the job
            _log.exception("kvwarehouse: a store could not be begun")
            self._stores.refuse(job)
            return
        self._held_stores.append(job)
        self._judge_stores()

    def refuse_store(self, number: int, request_id: str, step: int) -> None:
        """Of one job: nothing of it is stored."""
        self._stores.refuse(Job(number, request_id, [], time.monotonic(), step, self._epoch))

    def finished(self) -> list[JobOutcome]:
        """Of loads and stores, each once. Their memory is vLLM's again."""
        self._take_fetched()
        self._judge_stores()
        ended = self._judged_loads()
        for outcome in ended:
            self._loaded(outcome)
        stored = self._stores.take()
        self._counts.add(
            stored_chunks=sum(len(outcome.done) for outcome in stored),
            stored_bytes=sum(outcome.size_bytes for outcome in stored),
        )
        return ended + stored

    @property
    def pending(self) -> bool:
        """Whether something was fetched, or will be, that a further step of vLLM takes: its pins
        end there, also those of requests that have ended."""
        return self._fetches.pending

    @property
    def loading(self) -> bool:
        """Whether a load is under way, or has ended and was not reported: it counts where the
        weights of the step that began it were right."""
        return bool(self._held_loads) or self._loads.pending

    # -- the engine's weights ----------------------------------------------------------------------

    def weights_known(self, step: int) -> None:
        """They were right up to this step, or `forget` was called before."""
        self._known_step = max(self._known_step, step)
        self._judge_stores()

    def forget(self) -> None:
        """The weights may be others: nothing stored before is loaded again, requests that began
        before neither load nor store any more, and of their jobs no load that was not reported
        comes, and no store that was held is made."""
        self._epoch += 1
        self._epoch_twist = os.urandom(16)
        self._counts.add(new_epochs=0 if self._closed else 1)
        self._judge_stores()
        for request in self._requests.values():
            request.release()
            request.to_fetch.clear()
            request.coming.clear()
            request.facts = RequestFacts(loads=False, stores=False)

    # -- the engine's life -------------------------------------------------------------------------

    def drain(self) -> None:
        """vLLM resets its cache, perhaps for other weights: forgets. Blocks for jobs that run; all
        have ended then, and `finished` has them."""
        for jobs in (self._loads, self._stores, self._fetches):
            jobs.drain()
        self.forget()

    def close(self) -> None:
        """More than once is once. Blocks for jobs that run. Raises InternalError where one does not
        end in its time: vLLM's CPU tier must then stay mapped."""
        if self._closed:
            return
        self._closed = True
        ended = [jobs.close() for jobs in (self._loads, self._stores, self._fetches)]
        for request_id in list(self._requests):
            self.end(request_id)
        self.forget()
        # `finished` has them, also those that ended just now.
        self._held_loads += self._loads.take()
        for outcome in [*self._held_loads, *self._fetches.take()]:
            _release(outcome.job.pins)
        self._connection.close()
        _log.info("kvwarehouse: the tier is closed after %s", self.totals)
        if not all(ended):
            raise kvw.InternalError(
                "a thread of the tier goes on although vLLM ends, and may touch vLLM's CPU tier",
                code="still_running",
            )

    # -- within ------------------------------------------------------------------------------------

    def _load(self, job: Job) -> JobOutcome:
        return self._pages.load(job, self._rows, self._counts)

    def _store(self, job: Job) -> JobOutcome:
        return self._pages.store(job, self._rows, self._counts)

    def _chunks(self, request: _Request, rows: Iterable[tuple[bytes, int]]) -> list[TierChunk]:
        twist, groups = request.facts.twist, self._groups
        return [
            TierChunk(key, name_of(key, twist), groups[group_of(key)], int(row))
            for key, row in rows
        ]

    def _objection(self, job: Job) -> str | None:
        """What speaks against a job; "": nothing; None: that is not known yet."""
        if job.epoch != self._epoch:
            return "other_weights"
        if job.step <= self._known_step:
            return ""
        return None if job.left_s else "timeout"

    def _judge_stores(self) -> None:
        held, self._held_stores = self._held_stores, []
        for job in held:
            objection = self._objection(job)
            if objection is None:
                self._held_stores.append(job)
            elif objection:
                self._stores.refuse(job)
                self._counts.why("dropped", {objection: len(job.chunks)})
            elif not self._stores.submit(job):
                self._counts.why("dropped", {"queue_full": len(job.chunks)})

    def _judged_loads(self) -> list[JobOutcome]:
        """Of which it is known whether they count."""
        held, self._held_loads = self._held_loads + self._loads.take(), []
        ended = []
        for outcome in held:
            objection = self._objection(outcome.job) if outcome.done else ""
            if objection is None:
                self._held_loads.append(outcome)
                continue
            if objection:
                self._counts.why("missed", {objection: len(outcome.done)})
                outcome.done = []
            ended.append(outcome)
        return ended

    def _loaded(self, outcome: JobOutcome) -> None:
        _release(outcome.job.pins)
        done = {chunk.key for chunk in outcome.done}
        request = self._requests.get(outcome.job.request_id)
        if request is not None:
            request.release()
            request.failed |= {c.key for c in outcome.job.chunks if c.key not in done}
        self._counts.add(
            loaded_chunks=len(done),
            loaded_bytes=sum(chunk.group.space.page_bytes for chunk in outcome.done),
        )

    def _load_until(self) -> float:
        return time.monotonic() + self._settings.load_timeout_s

    def _take_fetched(self) -> None:
        for outcome in self._fetches.take():
            request = self._requests.get(outcome.job.request_id)
            if request is None:
                _release(outcome.job.pins)
                continue
            keys = {chunk.key for chunk in outcome.job.chunks}
            done = {chunk.key for chunk in outcome.done}
            request.pins += outcome.job.pins
            for key in keys:
                request.coming.pop(key, None)
            request.fetched |= done
            request.failed |= keys - done
            self._counts.add(fetched_chunks=len(done))


def _release(pins: list[kvw.Pins]) -> None:
    while pins:
        with suppress(kvw.WarehouseError):
            pins.pop().release()

"""The scheduler's half: what to load, what to store. Nothing here waits for anybody.

TensorRT-LLM calls it on rank 0, from the one thread that schedules, with the block manager's lock
held in a lookup. It reads shared memory, pins what it promises, and gives orders with each step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prefix_matcher import (
    PrefixHit,
    PrefixMatcher,
    consecutive,
    page_run,
)
from kvwarehouse_connectors.trtllm import compat, handshake
from kvwarehouse_connectors.trtllm.counts import Counts
from kvwarehouse_connectors.trtllm.keys import PromptKeys
from kvwarehouse_connectors.trtllm.messages import LoadOrder, SaveOrder, TrtllmStepMetadata
from kvwarehouse_connectors.trtllm.offers import Offers, ReadinessBarrier
from kvwarehouse_connectors.trtllm.parts import ABSENT
from kvwarehouse_connectors.trtllm.settings import Settings
from kvwarehouse_connectors.trtllm.store_planner import TrtllmStorePlanner
from kvwarehouse_connectors.trtllm.tracked import TrtllmRequest

_log = logging.getLogger(__name__)

# Hits that wait for blocks, or are being loaded, keep their pins; more of them are not promised.
_MOST_PINNED_HITS = 64
# How fast a load of a request that is gone is believed to go on at least, on each rank: a worker
# tries it for as long as pages come.
_SLOWEST_BYTES_PER_S = 64 << 20


class SchedulerSide:
    """Raises UsageError where this engine cannot be served, naming why; a daemon that is not there
    is no error."""

    def __init__(self, llm_args: Any, settings: Settings) -> None:
        self._llm_args = llm_args
        self._settings = settings
        self._connection = DaemonConnection(
            settings.address,
            ConnectionOptions(verify=settings.verify, read_only=True, engine="trtllm"),
        )
        self._cache_info: handshake.TrtllmCacheInfo | None = None
        self._offers: Offers | None = None
        self._barrier: ReadinessBarrier | None = None
        self._planner: TrtllmStorePlanner | None = None
        self._requests: dict[int, TrtllmRequest] = {}
        self._loads: list[LoadOrder] = []
        self._saves: list[SaveOrder] = []
        self._let_go: deque[tuple[float, PrefixHit]] = deque()  # pins of loads that nobody reports
        self.counts = Counts("scheduler")

    @property
    def cache_info(self) -> handshake.TrtllmCacheInfo | None:
        """What the worker of this process saw; None until it has registered the cache."""
        if self._cache_info is None:
            found = handshake.read(self._llm_args)
            if found is not None:
                self._offers = Offers(found, self._settings.lookup_budget_s)
                self._barrier = ReadinessBarrier(self._connection, found.barrier)
                self._planner = TrtllmStorePlanner(found.groups, found.spaces, self._settings)
                self._cache_info = found
        return self._cache_info

    def check_cache_info(self) -> None:
        """At the end of the engine's start."""
        if self.cache_info is None:
            raise compat.unsupported(
                "this engine", "registered no KV cache with the worker in the scheduler's process"
            )

    # -- a request's way -------------------------------------------------------------------------

    def matched(self, request: Any, local_tokens: int) -> tuple[int, bool]:
        """Tokens to load beyond local_tokens, and whether the request alone waits for them. Called
        once for each time the engine gives the request blocks."""
        self._forget(compat.request_id(request))
        cache_info = self.cache_info
        if cache_info is None:
            return 0, False
        tracked = self._track(request, cache_info)
        if tracked is None or not tracked.loads:
            return 0, False
        if local_tokens % cache_info.block_tokens:
            # The engine may be copying that part of a block, on a stream of its own.
            self.counts.add("unaligned_lookups")
            return 0, False
        hit = self._find(compat.request_id(request), tracked, local_tokens)
        if hit is None:
            return 0, False
        tracked.hit = hit
        tracked.awaited = self._settings.load == "async"
        self.counts.add("promised_tokens", hit.tokens - local_tokens)
        return hit.tokens - local_tokens, tracked.awaited

    def allocated(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """The engine gave a request blocks, those of each layer group. Raises RuntimeError where
        what was promised has no blocks: nobody could deliver it."""
        name = compat.request_id(request)
        tracked = self._requests.get(name)
        if tracked is None or not (tracked.hit or tracked.awaited):
            return
        hit, cache_info = tracked.hit, self._cache_info
        assert cache_info is not None
        runs: tuple[PageRun, ...] = ()
        if hit is not None:
            runs = _load_runs(cache_info, hit, tracked.keys, tables)
            self._check_runs(request, hit, cache_info, tables)
            if not tracked.awaited:
                tracked.external_tokens = (
                    self._honoured(request, hit, cache_info),
                    hit.tokens - hit.local_tokens,
                )
        tracked.hit, tracked.loading = None, hit
        tracked.waits = not tracked.awaited
        self._loads.append(LoadOrder(name, runs, tracked.waits))
        tracked.awaited = False

    def step_metadata(self, output: Any) -> TrtllmStepMetadata:
        """This step's work for the workers."""
        self._steps_ended()
        cache_info = self.cache_info
        if cache_info is None:
            return TrtllmStepMetadata()
        scheduled = self._scheduled(output)
        metadata = TrtllmStepMetadata(
            spaces=tuple(space.id for space in cache_info.spaces),
            barrier_key=self._barrier_key(),
            loads=self._loads,
            stores=self._stores_of(scheduled),
            saves=self._saves,
        )
        self._loads, self._saves = [], []
        if self._planner is not None:
            self.counts.add("dropped_blocks", self._planner.take_dropped())
        for order in metadata.loads:
            tracked = self._requests.get(order.request_id)
            if tracked is not None and order.waits and tracked.loading is not None:
                # Over when the next step is planned: all ranks meet after each one.
                self._let_go.append((0.0, tracked.loading))
                tracked.loading = None
        self.counts.log()
        return metadata

    def finished(self, request: Any) -> bool:
        """A request ended, whichever way. Returns whether its blocks are to be held, until the
        workers report them as copied."""
        name = compat.request_id(request)
        tracked = self._requests.get(name)
        held = tracked is not None and self._hold(name, tracked)
        if tracked is not None and self._planner is not None:
            self._planner.ended(tracked)
        self._forget(name)
        return held

    def reset(self, request: Any) -> None:
        """A request's blocks were taken away; it will be looked up again."""
        self._forget(compat.request_id(request))

    def cancelled(self, request: Any, begin: int) -> None:
        """The engine takes nothing from token `begin` on of what was promised."""
        tracked = self._requests.get(compat.request_id(request))
        if tracked is not None and tracked.hit is not None and begin <= tracked.hit.local_tokens:
            tracked.hit.release()
            tracked.hit = None  # if it is awaited, an empty order says that it is over

    def close(self) -> None:
        for name in list(self._requests):
            self._forget(name)
        while self._let_go:
            self._let_go.popleft()[1].release()
        if self._offers is not None:
            self._offers.close()
        self._connection.close()
        self.counts.log(now=True)

    # -- inside ----------------------------------------------------------------------------------

    def _track(self, request: Any, cache_info: handshake.TrtllmCacheInfo) -> TrtllmRequest | None:
        if compat.request_problem(request):
            return None
        salt = compat.request_salt(request)
        keys = PromptKeys(salt or b"", cache_info.block_tokens)
        try:
            keys.extend(compat.request_tokens(request))
        except ValueError:
            return None  # placeholders of media: their content has no name here
        tracked = TrtllmRequest(
            keys=keys,
            prompt_tokens=compat.prompt_tokens(request),
            salt=salt,
            loads=self._settings.loads and salt is not None,
            stores=self._settings.stores and salt is not None,
            considered=[0] * len(cache_info.groups),
        )
        self._requests[compat.request_id(request)] = tracked
        return tracked

    def _find(self, name: int, tracked: TrtllmRequest, local_tokens: int) -> PrefixHit | None:
        matcher = self._matcher()
        if matcher is None or self._offers is None or self._barrier is None:
            return None
        held = sum(1 for one in self._requests.values() if one.hit or one.loading)
        if held + len(self._let_go) >= _MOST_PINNED_HITS:
            return None
        # The last token is always computed: the engine refuses to have all of a prompt.
        limit = min(tracked.prompt_tokens, tracked.keys.tokens) - 1
        try:
            if not self._barrier.complete():
                return None
            hit, unready = self._offers.find(matcher, tracked.keys, local_tokens, limit)
            self._connection.note(
                matcher.note(
                    str(name), tracked.keys, tracked.prompt_tokens, local_tokens, limit, hit
                )
            )
        except kvw.WarehouseError as error:
            self._lost(error)
            return None
        if hit is None and unready:
            self.counts.add("unready_hits")
        return hit

    def _scheduled(self, output: Any) -> list[TrtllmRequest]:
        """The requests of this step that are known here, brought up to date."""
        found = []
        for data, new in (
            *((data, True) for data in output.new_requests),
            *((data, False) for data in output.cached_requests),
        ):
            tracked = self._requests.get(int(data.request_id))
            if tracked is None or not (new or tracked.tables):
                continue
            if new:
                self._loaded(tracked)
            try:
                tracked.begin(data) if new else tracked.go_on(data)
            except Exception:  # noqa: BLE001 - the engine's edge; the step's loads must not be lost
                _log.exception("kvwarehouse: request %d is not stored", data.request_id)
                tracked.stores = False
                continue
            self._check_salt(tracked, data)
            found.append(tracked)
        return found

    def _check_runs(
        self,
        request: Any,
        hit: PrefixHit,
        cache_info: handshake.TrtllmCacheInfo,
        tables: Sequence[Sequence[int]],
    ) -> None:
        """Every block of full attention that the engine will take as loaded has a place."""
        wanted = (
            hit.local_tokens + self._honoured(request, hit, cache_info)
        ) // cache_info.block_tokens
        begin = hit.local_tokens // cache_info.block_tokens
        for group in cache_info.groups:
            table = tables[group.index]
            if group.reach_tokens:
                continue  # the engine says by its slots which blocks the window needs
            if len(table) < wanted or ABSENT in table[begin:wanted]:
                raise RuntimeError(
                    f"kvwarehouse promised request {compat.request_id(request)} blocks {begin} to"
                    f" {wanted - 1}, and layer group {group.index} has room for"
                    f" {sum(1 for slot in table[begin:wanted] if slot != ABSENT)} of them: please"
                    " report this, with TensorRT-LLM's version"
                )

    def _honoured(self, request: Any, hit: PrefixHit, cache_info: handshake.TrtllmCacheInfo) -> int:
        """Tokens of the promise that the engine takes: with one pool tensor always all."""
        offered = hit.tokens - hit.local_tokens
        if cache_info.pool:
            return offered
        return min(offered, compat.honoured_tokens(request) or 0)

    def _check_salt(self, tracked: TrtllmRequest, data: Any) -> None:
        """What was looked up without a salt is not stored for a request that has one."""
        if getattr(data, "cache_salt", None) is not None and not tracked.salt:
            tracked.stores = False

    def _loaded(self, tracked: TrtllmRequest) -> None:
        """A load that its request waited for is over: the engine goes on with it."""
        if tracked.loading is not None and not tracked.waits:
            tracked.loading.release()
            tracked.loading = None

    def _stores_of(self, scheduled: list[TrtllmRequest]) -> list[Any]:
        matcher = self._matcher() if self._settings.stores else None
        if matcher is None or self._planner is None or self._connection.control() is None:
            return []
        try:
            return self._planner.plan(scheduled, matcher)
        except kvw.WarehouseError as error:
            self._lost(error)
        except Exception:  # noqa: BLE001 - the engine's edge; the step's loads must not be lost with it
            _log.exception("kvwarehouse: a step's stores could not be planned")
        return []

    def _hold(self, name: int, tracked: TrtllmRequest) -> bool:
        matcher = self._matcher()
        if not (self._settings.hold_s and tracked.stores and matcher and self._planner):
            return False
        if self._connection.control() is None or not self._planner.behind(tracked):
            return False
        try:
            runs = self._planner.rest(tracked, matcher)
        except kvw.WarehouseError as error:
            self._lost(error)
            return False
        if runs:
            self._saves.append(SaveOrder(name, runs))
            self.counts.add("held_requests")
        return bool(runs)

    def _barrier_key(self) -> bytes:
        try:
            return self._barrier.key() if self._barrier is not None else b""
        except kvw.WarehouseError as error:
            self._lost(error)
            return b""

    def _forget(self, name: int) -> None:
        """The request's blocks are the engine's again, or will be."""
        tracked = self._requests.pop(name, None)
        if tracked is None:
            return
        dropped = [order for order in self._loads if order.request_id == name]
        self._loads = [order for order in self._loads if order.request_id != name]
        if any(not order.waits for order in dropped):
            # The engine waits to hear of it all the same: until then it keeps the request.
            self._loads.append(LoadOrder(name, (), waits=False))
        if tracked.loading is not None and not dropped:
            # A worker may still read; it gives up after its own time without a page.
            bound_s = self._most_load_s(tracked.loading)
            self._let_go.append((time.monotonic() + bound_s, tracked.loading))
            tracked.loading = None
        tracked.release()

    def _most_load_s(self, hit: PrefixHit) -> float:
        assert self._cache_info is not None
        spaces = self._cache_info.spaces
        size_bytes = sum(
            (part.end - part.begin) * spaces[part.place].page_bytes for part in hit.groups
        )
        return 2 * self._settings.load_timeout_s + size_bytes / _SLOWEST_BYTES_PER_S

    def _steps_ended(self) -> None:
        """Lets go the pins of loads that are over."""
        now = time.monotonic()
        kept: deque[tuple[float, PrefixHit]] = deque()
        for until_s, hit in self._let_go:
            if until_s > now:
                kept.append((until_s, hit))
            else:
                hit.release()
        self._let_go = kept

    def _matcher(self) -> PrefixMatcher | None:
        """None while there is no daemon that knows our namespaces."""
        info = self._cache_info
        if info is None:
            return None
        return PrefixMatcher.at_daemon(
            self._connection, info.groups, info.spaces, info.block_tokens
        )

    def _lost(self, error: kvw.WarehouseError) -> None:
        _log.debug("the warehouse could not be asked: %s", error)
        if self._cache_info is not None:
            for space in (*self._cache_info.spaces, self._cache_info.barrier):
                self._connection.call_failed(space, error)


def _load_runs(
    cache_info: handshake.TrtllmCacheInfo,
    hit: PrefixHit,
    keys: PromptKeys,
    tables: Sequence[Sequence[int]],
) -> tuple[PageRun, ...]:
    """What to load of a hit: the blocks that have a slot now. An offer may outrun the slots that
    there are; what is left of it is computed."""
    runs = []
    for group_hit in hit.groups:
        group = cache_info.groups[group_hit.place]
        table = tables[group.index]
        wanted = [
            block
            for block in range(group_hit.begin, min(group_hit.end, len(table)))
            if table[block] != ABSENT
        ]
        runs += [
            page_run(group_hit.place, group, keys, part, table) for part in consecutive(wanted)
        ]
    return tuple(runs)

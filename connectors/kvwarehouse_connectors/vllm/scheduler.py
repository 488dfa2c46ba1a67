"""The scheduler's half: what to load, what to store. Nothing here waits for anybody.

It reads shared memory, pins what it promises, and gives orders to the workers with each step. Runs
in the engine's scheduler thread alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.groups import Rule
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prefix_matcher import PrefixHit, PrefixMatcher, load_runs
from kvwarehouse_connectors.core.prompt_keeper import KeepWish, PromptKeeper
from kvwarehouse_connectors.vllm import compat, identity
from kvwarehouse_connectors.vllm.adapters import AdapterLook, Adapters
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from kvwarehouse_connectors.vllm.draft_holes import DraftHoles
from kvwarehouse_connectors.vllm.events import StoreEvents
from kvwarehouse_connectors.vllm.handoff import boot_s
from kvwarehouse_connectors.vllm.handoff_coordinator import HandoffCoordinator
from kvwarehouse_connectors.vllm.keys import CRYPTOGRAPHIC, OWN_SCHEME, RequestKeys, chain_for
from kvwarehouse_connectors.vllm.load_policy import LoadPolicy
from kvwarehouse_connectors.vllm.messages import CacheInfo, LoadOrder, StepMetadata, StepResults
from kvwarehouse_connectors.vllm.settings import Settings
from kvwarehouse_connectors.vllm.stats import WarehouseStats
from kvwarehouse_connectors.vllm.store_planner import VllmStorePlanner
from kvwarehouse_connectors.vllm.tracked import VllmRequest
from kvwarehouse_connectors.vllm.weights_watch import CacheEpochs
from kvwarehouse_connectors.vllm.wishes import (
    LOAD,
    RELEASE,
    STORE,
    UnknownWishes,
    asked,
    keep_as,
    keep_s,
    switch,
)

_log = logging.getLogger(__name__)

# At the engine's start only: it is then not serving anybody.
_START_WAIT_S = 3.0
# Hits that wait for room in the engine keep their pins; more of them do not.
_MOST_PINNED_HITS = 64


class SchedulerSide:
    """Raises UsageError where this engine cannot be served, naming why; a daemon that is not there
    is no error."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._settings = settings
        self._groups = cache_groups(kv_cache_config)
        self._shards = compat.shards(vllm_config, kv_cache_config)
        # The last token is always computed: its logits are what the engine is after. In full
        # attention its KV may be there already: vLLM takes a hit of all tokens, and computes that
        # one alone. A state would then have it twice, a window may begin a block earlier, and a
        # draft model's first guess is then a bad one.
        prefixes = all(group.rule is Rule.PREFIX for group in self._groups)
        drafts = compat.draft_model(vllm_config) is not None
        self._computed_tokens = 0 if prefixes and not drafts else 1
        self._align = math.lcm(*(group.block_tokens for group in self._groups))
        algorithm = compat.hash_algorithm(vllm_config)
        self._own_chain = algorithm not in CRYPTOGRAPHIC
        self._chain = chain_for(algorithm, self._groups[0].hash_tokens)
        self._weights = identity.weights_fingerprint(vllm_config, settings)
        self._draft = identity.draft_identity(vllm_config, settings, self._weights)
        self._lookahead_tokens = 0
        self._holes: DraftHoles | None = None
        if drafts:
            self._lookahead_tokens = compat.draft_lookahead_tokens(vllm_config)
            self._holes = DraftHoles(
                compat.draft_limit_tokens(vllm_config), self._groups[0].hash_tokens
            )
        self._adapters = Adapters()
        self._connection = DaemonConnection(
            settings.address,
            ConnectionOptions(verify=settings.verify, read_only=True, engine="vllm"),
        )
        self._requests: dict[str, VllmRequest] = {}
        self._looks: dict[str, AdapterLook] = {}  # of requests whose adapter is not known yet
        self._loading: dict[str, PrefixHit] = {}
        self._new_loads: list[LoadOrder] = []
        self._spaces: tuple[kvw.Namespace, ...] = ()
        self._told = False  # the workers know the namespaces
        self._load_policy: LoadPolicy | None = None
        self._stats = WarehouseStats.empty()
        self._unknown_wishes = UnknownWishes(self._count)
        self._keeper = PromptKeeper(self._connection)
        self._held = 0  # hits that wait for room in the engine
        self._epochs = CacheEpochs()
        self._events = StoreEvents(
            vllm_config, self._groups, self._shards, compat.event_fields(kv_cache_config)
        )
        self._planner: VllmStorePlanner | None = None
        self._coordinator: HandoffCoordinator | None = None

    # -- once ----------------------------------------------------------------------------------

    def set_cache_info(self, by_rank: Mapping[tuple[int, int], CacheInfo]) -> None:
        """What the workers saw of their tensors, by pipeline stage and rank within it. Raises
        UsageError where they differ in more than the layers of stages and the memory for stores."""
        cache_info, stages = identity.one_of_all(by_rank)
        self._spaces = identity.namespaces(
            self._vllm_config,
            self._groups,
            cache_info,
            identity.Shared(
                self._weights,
                self._hash_scheme(),
                self._shards,
                self._settings.salt,
                self._draft,
                stages,
            ),
        )
        self._load_policy = LoadPolicy(
            self._settings, self._spaces, self._groups, cache_info.device
        )
        self._planner = VllmStorePlanner(
            self._groups, self._spaces, self._settings, cache_info.staging_bytes // 2, self._events
        )
        self._coordinator = HandoffCoordinator(
            self._groups,
            self._spaces,
            self._connection,
            self._settings.handoff_wait_s,
            self._count,
        )
        for space in self._spaces:
            try:
                self._connection.wait_namespace(space, _START_WAIT_S)
            except kvw.UsageError:
                break  # refused, and said so in the log: the engine computes
        _log.info("kvwarehouse: namespaces %s", ", ".join(s.id.hex() for s in self._spaces))

    def set_cache_manager(self, manager: Any) -> None:
        """vLLM's own."""
        self._epochs.watch(manager)

    def _hash_scheme(self) -> str:
        return OWN_SCHEME if self._own_chain else compat.hash_scheme(self._vllm_config)

    # -- a request's way -------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._unknown_wishes.look_for(request.kv_transfer_params)
        look = self._adapters.look(request.lora_request)
        if look is None:
            self._track(request, None)
        else:
            self._looks[request.request_id] = look

    def _track(self, request: Any, look: AdapterLook | None) -> None:
        """look: what it found is taken as it is."""
        params = request.kv_transfer_params
        adapter = self._adapters.fingerprint(look)
        # Tokens of a session may be taken back, and media may have names of their own.
        own = request.resumable or compat.own_media(request, self._vllm_config)
        known = adapter is not None and not own
        if self._lookahead_tokens and compat.media_or_embeddings(request):
            known = False  # the token behind a block is not all that the draft sees of it
        twist = self._epochs.twist + (adapter or b"")
        loads = self._settings.loads and known and switch(params, LOAD)
        releases = known and asked(params, RELEASE)
        stores = self._settings.stores and known and switch(params, STORE) and not releases
        self._requests[request.request_id] = VllmRequest(
            request=request,
            keys=RequestKeys(
                request,
                self._chain(),
                twist[:64],
                self._groups[0].hash_tokens,
                self._lookahead_tokens,
            ),
            loads=loads,
            stores=stores,
            releases=releases,
            keep_s=keep_s(params, self._settings.keep_limit_s) if known and not releases else 0.0,
            epoch=self._epochs.epoch,
            look=look,
            handoff=self._coordinator.received(params)
            if loads and self._coordinator is not None
            else None,
            considered=[0] * len(self._groups),
        )

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load beyond local_tokens, always asynchronously; None: ask again."""
        self._see_resets()
        look = self._looks.get(request.request_id)
        if look is not None:
            if self._adapters.pending(look):
                return None, False
            del self._looks[request.request_id]
            self._track(request, look)
        tracked = self._requests.get(request.request_id)
        if tracked is not None and self._holes is not None:
            local_hashes = request.block_hashes[: local_tokens // self._groups[0].hash_tokens]
            tracked.stores = tracked.stores and not self._holes.found_in(local_hashes)
        if tracked is None or not tracked.loads or request.skip_reading_prefix_cache:
            return 0, False
        if self._epochs.mixed or self._adapters.fingerprint(tracked.look) is None:
            return 0, False
        hit = tracked.hit
        if hit is None or hit.local_tokens != local_tokens:
            self._drop_hit(tracked)
            if boot_s() < tracked.ask_again_s:
                return None, False
            hit, waits = self._find(tracked, local_tokens)
            if waits:
                return None, False
            tracked.hit = hit
            self._held += hit is not None
        return (hit.tokens - local_tokens, True) if hit is not None else (0, False)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine gave blocks to a request; `tokens` of it are ours to load now."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        self._send_note(tracked, tokens)
        hit = tracked.hit
        if not tokens:
            self._drop_hit(tracked)
            return
        if hit is None or self._load_policy is None or tokens != hit.tokens - hit.local_tokens:
            self._drop_hit(tracked)
            self.refuse(request)
            return
        tracked.hit = None
        self._held -= 1
        self._loading[request.request_id] = hit
        runs = load_runs(self._groups, hit, tracked.keys, tables)
        self._new_loads.append(
            LoadOrder(
                request.request_id,
                runs,
                self._load_policy.page_compute_s(hit),
                from_nvme=hit.dram_share < 1,
                from_remote=hit.remote_share > 0,
            )
        )

    def refuse(self, request: Any) -> None:
        """The engine waits for a load that cannot be made: the workers report it as failed."""
        self._new_loads.append(LoadOrder(request.request_id, (), refused=True))

    def hit_sources(self, request: Any, tokens: int) -> dict[Any, int]:
        """`tokens` by the tier they come from."""
        hit = self._loading.get(request.request_id)
        if hit is None or not tokens:
            return {}
        dram = round(tokens * hit.dram_share)
        split = {compat.CacheHitSource.HOST: dram, compat.CacheHitSource.DISK: tokens - dram}
        self._stats.add("hit_tokens_dram", dram)
        remote = min(tokens - dram, round(tokens * hit.remote_share))
        self._stats.add("hit_tokens_nvme", tokens - dram - remote)
        self._stats.add("hit_tokens_remote", remote)
        return {source: part for source, part in split.items() if part}

    def step_metadata(self, step: Any) -> StepMetadata:
        """This step's work for the workers."""
        if self._load_policy is not None:
            self._load_policy.step_begins(step.num_scheduled_tokens)
        self._see_resets()
        for request_id in step.num_scheduled_tokens if self._looks else ():
            self._looks.pop(request_id, None)  # it does not wait: nobody knows what it computes
        if self._holes is not None:
            self._holes.look(step, self._requests)
        metadata = StepMetadata(
            loads=self._new_loads,
            stores=self._stores_of(step),
            epoch=self._epochs.epoch,
            resets=self._epochs.resets,
        )
        self._new_loads = []
        works = step.total_num_scheduled_tokens or metadata.loads or metadata.stores
        metadata.idle = not works
        self._count_dropped()
        if not self._told and (metadata.loads or metadata.stores):
            metadata.spaces = self._spaces
            self._told = True
        return metadata

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request ended, whichever way. Returns the hand-off record, where one is wanted."""
        self._adapters.used(request)
        self._looks.pop(request.request_id, None)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        if self._holes is not None:
            self._holes.ended(request)
        self._drop_hit(tracked)
        if tracked.releases:
            self._release(tracked)
        if tracked.keep_s:
            self._keep(tracked)
        if self._planner is not None:
            self._planner.ended(tracked)
            self._count_dropped()
        if self._planner is None or self._coordinator is None:
            return None
        if not self._planner.handoff_wanted(tracked):
            return None
        return self._coordinator.record(tracked, self._planner.stored_tokens(tracked))

    # -- what the workers say --------------------------------------------------------------------

    def take_results(self, results: StepResults | None, received: Iterable[str]) -> None:
        for request_id in received:
            hit = self._loading.pop(request_id, None)
            if hit is not None:
                hit.release()
        if results is None:
            return
        for request_id in results.failed:
            self._stats.add("failed_loads")
            if request_id in self._requests:
                self._requests[request_id].loads = False
        if self._load_policy is not None:
            self._load_policy.delivered(results)
        self._events.stored(results.stored)
        if self._epochs.take(results.weights):
            self._stats.add("weights_changed")
            self._forget()

    def step_ends(self) -> WarehouseStats | None:
        if self._load_policy is not None:
            self._load_policy.step_ends()
        for name, amount in self._keeper.take_counts().items():
            self._stats.add(name, amount)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, WarehouseStats.empty()
        return stats

    def take_events(self) -> Iterable[Any]:
        return self._events.take()

    def has_pending_work(self) -> bool:
        return self._events.pending()

    # -- the engine's life -----------------------------------------------------------------------

    def reset(self) -> None:
        """The connector is reset, and the engine's cache was, unless requests have blocks of it:
        nothing stored before is loaded by it again, and requests that began before store nothing
        more."""
        self._was_reset()
        self._epochs.begin()
        self._forget()

    def _forget(self) -> None:
        """A new epoch of keys: requests of the one before neither load nor store any more."""
        for tracked in self._requests.values():
            self._drop_hit(tracked)
            tracked.loads = tracked.stores = False
        self._looks.clear()
        self._events.cleared()

    def close(self) -> None:
        for tracked in self._requests.values():
            self._drop_hit(tracked)
        self._adapters.close()
        self._keeper.close()
        self._connection.close()

    # -- inside ----------------------------------------------------------------------------------

    def _was_reset(self) -> bool:
        seen = self._epochs.was_reset()
        if seen:
            self._adapters.forget()
            if self._holes is not None:
                self._holes.clear()
        return seen

    def _see_resets(self) -> None:
        if self._was_reset():
            _log.info(
                "kvwarehouse: vLLM's prefix cache was reset, and pages in the warehouse are served"
                " as before while the weights are the same. To forget those too: POST"
                " /reset_prefix_cache?reset_external=true"
            )

    def _stores_of(self, step: Any) -> list[PageRun]:
        wanted = self._settings.stores and not self._epochs.mixed
        matcher = self._matcher() if wanted else None
        if matcher is None or self._planner is None:
            return []
        try:
            requests = self._of_known_adapters(step)
            return self._planner.plan(step, requests, matcher, self._epochs.epoch)
        except kvw.WarehouseError as error:
            self._lost(error)
        except Exception:  # noqa: BLE001 - the engine's edge; the step's loads must not be lost with it
            _log.exception("kvwarehouse: a step's stores could not be planned")
        return []

    def _of_known_adapters(self, step: Any) -> Mapping[str, VllmRequest]:
        """The requests, without those of the step whose adapter's files have changed, or were not
        looked at for a while: these store in later steps what can wait."""
        unknown = set()
        for request_id in step.num_scheduled_tokens:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.look is None or not tracked.stores:
                continue
            if not self._adapters.still_known(tracked.look):
                unknown.add(request_id)
        if not unknown:
            return self._requests
        return {name: one for name, one in self._requests.items() if name not in unknown}

    def _matcher(self) -> PrefixMatcher | None:
        """None while there is no daemon that knows our namespaces."""
        return PrefixMatcher.at_daemon(self._connection, self._groups, self._spaces, self._align)

    def _find(self, tracked: VllmRequest, local_tokens: int) -> tuple[PrefixHit | None, bool]:
        """What is worth loading, pinned; and whether more is about to come, so that the engine
        should ask again instead."""
        matcher = self._matcher()
        if matcher is None or self._load_policy is None or self._coordinator is None:
            if self._coordinator is not None:
                self._coordinator.give_up(tracked)
            return None, False
        limit = tracked.request.num_tokens - self._computed_tokens
        try:
            hit = matcher.find(tracked.keys, local_tokens, limit)
            there = hit.tokens if hit is not None else local_tokens
            if self._coordinator.should_wait(tracked, there, limit):
                return None, True
            name = compat.request_name(tracked.request.request_id)
            tokens = tracked.request.num_tokens
            tracked.note = matcher.note(name, tracked.keys, tokens, local_tokens, limit, hit)
            if hit is None:
                return None, False
            control = self._connection.control()
            while hit is not None:
                worth = self._load_policy.worth_tokens(hit, control)
                if worth >= hit.tokens:
                    break
                shorter = worth > local_tokens
                hit = matcher.find(tracked.keys, local_tokens, worth) if shorter else None
            if hit is not None and self._held < _MOST_PINNED_HITS:
                matcher.pin(hit, tracked.keys)
        except kvw.WarehouseError as error:
            self._lost(error)
            return None, False
        return hit, False

    def _send_note(self, tracked: VllmRequest, tokens: int) -> None:
        """For `kvwarehouse why --request`: what was found, and that `tokens` of it are loaded."""
        note, tracked.note = tracked.note, None
        if note is not None:
            self._connection.note(replace(note, load_tokens=note.engine_tokens + tokens))

    def _release(self, tracked: VllmRequest) -> None:
        """What earlier requests stored of a conversation that is over; it stored nothing itself."""
        matcher = self._matcher()
        if matcher is None or tracked.epoch != self._epochs.epoch:
            return
        try:
            self._stats.add("released_blocks", matcher.release(tracked.keys))
        except kvw.WarehouseError as error:
            self._lost(error)

    def _keep(self, tracked: VllmRequest) -> None:
        """What is stored of it, or will be in a moment: for a request that goes on from its prompt,
        or from all of it."""
        matcher = self._matcher()
        if matcher is None or tracked.epoch != self._epochs.epoch:
            return
        request, params = tracked.request, tracked.request.kv_transfer_params
        name = keep_as(params, compat.request_name(request.request_id), request.cache_salt)
        computed = request.num_computed_tokens
        parts = matcher.to_keep(tracked.keys, computed, (request.num_prompt_tokens, computed))
        if parts:
            self._keeper.keep(KeepWish(name, tracked.keep_s, parts))

    def _drop_hit(self, tracked: VllmRequest) -> None:
        self._held -= tracked.hit is not None
        tracked.drop_hit()

    def _count_dropped(self) -> None:
        if self._planner is not None:
            self._stats.add("dropped_blocks", self._planner.take_dropped() * self._shards)

    def _count(self, name: str) -> None:
        self._stats.add(name)

    def _lost(self, error: kvw.WarehouseError) -> None:
        _log.debug("the warehouse could not be asked: %s", error)
        for space in self._spaces:
            self._connection.call_failed(space, error)

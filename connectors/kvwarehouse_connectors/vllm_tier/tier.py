"""The tier as vLLM's tiering manager knows it: a shell around TierCore. Whatever goes wrong in it
after the start ends here: it is logged, and is a miss or a failed job; vLLM computes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import Locality, LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

import kvwarehouse as kvw
from kvwarehouse_connectors.core.hooks import never_raises
from kvwarehouse_connectors.vllm.adapters import AdapterLook
from kvwarehouse_connectors.vllm_tier import identity
from kvwarehouse_connectors.vllm_tier.chunks import Rows
from kvwarehouse_connectors.vllm_tier.handover import current_link
from kvwarehouse_connectors.vllm_tier.jobs import JobOutcome
from kvwarehouse_connectors.vllm_tier.metrics import CountsSinceLast, definitions
from kvwarehouse_connectors.vllm_tier.rank_rows import RankRows
from kvwarehouse_connectors.vllm_tier.settings import read_settings
from kvwarehouse_connectors.vllm_tier.tier_core import LookupAnswer, RequestFacts, TierCore

_log = logging.getLogger(__name__)

_RESULTS = {
    LookupAnswer.HIT: LookupResult.HIT,
    LookupAnswer.COMING: LookupResult.RETRY,
    LookupAnswer.MISS: LookupResult.MISS,
}


@dataclass
class _AdapterRequest:
    """A request with an adapter. facts: what holds once the adapter is known; None: it holds."""

    look: AdapterLook
    facts: RequestFacts | None


class WarehouseTier(SecondaryTierManager):
    """Raises UsageError at the start where a setting is bad, nothing names the weights (code
    "no_weights"), or another tier is beside it (code "unsupported"); never later. Blocks then for
    reading the files of the weights."""

    # Its chunks are in DRAM or on NVMe, so that a request that asks for either kind has it.
    medium = None

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(settings.get("locality", Locality.LOCAL.value))
        self._settings = read_settings(settings)
        _refuse_others(tier_type, offloading_spec.config.extra_config.get("secondary_tiers", []))
        link = current_link()
        if link is None:
            raise kvw.UsageError(
                "kvwarehouse cannot tell which weights this engine has: vLLM tells a tier nothing"
                ' of it. Start it with "kv_connector": "WarehouseOffloadingConnector" and'
                ' "kv_connector_module_path": "kvwarehouse_connectors.vllm_tier" in place of'
                " OffloadingConnector; kvwarehouse.weights alone does not do, because nobody would"
                " tell how blocks lie, or which requests have media or adapters of their own",
                code="no_weights",
            )
        self._link = link
        self._with_adapters: dict[str, _AdapterRequest] = {}
        self._weights = identity.all_weights(link.vllm_config, self._settings)
        self._core = TierCore(self._settings, _rows_of(primary_kv_view))
        self._counts = CountsSinceLast()
        link.tiers.append(self)

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM asks in the process that serves its metrics."""
        return dict(definitions())

    @never_raises()
    def get_stats(self) -> Any:
        return self._counts.take(self._core.totals)

    # -- what the connector tells ------------------------------------------------------------------

    def rows_known(self, ranks: Sequence[RankRows]) -> None:
        """The workers have said how their KV lies. Raises UsageError where one has not."""
        config = self._offloading_spec.config
        groups = identity.row_groups(
            self._link.vllm_config, config, ranks, self._weights, self._settings.salt
        )
        self._core.serve(groups)
        names = ", ".join(group.space.id.hex() for group in groups.values())
        _log.info("kvwarehouse: namespaces %s", names)

    @property
    def loading(self) -> bool:
        """See TierCore."""
        return self._core.loading

    def weights_known(self, step: int) -> None:
        self._core.weights_known(step)

    def forget(self) -> None:
        self._with_adapters.clear()
        self._core.forget()

    # -- a request ---------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._begin(req_context.req_id)
        return RequestOffloadingContext()

    @never_raises()
    def _begin(self, request_id: str) -> None:
        facts, look = self._link.facts(request_id)
        if look is None:
            self._core.begin(request_id, facts)
        else:
            self._core.begin(request_id, RequestFacts(loads=False, stores=False))
            self._with_adapters[request_id] = _AdapterRequest(look, facts)

    def _await_adapter(self, request_id: str) -> bool:
        """Whether it is not known yet which weights a request's adapter has."""
        asked = self._with_adapters.get(request_id)
        if asked is None:
            return False
        if asked.facts is None:
            if self._link.adapters.fingerprint(asked.look) is None:
                self._core.distrust(request_id)
            return False
        if self._link.adapters.pending(asked.look):
            return True
        twist = self._link.adapters.fingerprint(asked.look)
        if twist is not None:
            self._core.begin(request_id, replace(asked.facts, twist=twist))
        asked.facts = None
        return False

    @never_raises(default=False)
    def _look_again(self, request_id: str) -> bool:
        """Before a request's blocks are stored: its adapter's files may have changed. False: that
        is not known now."""
        asked = self._with_adapters.get(request_id)
        if asked is None or self._await_adapter(request_id):
            return True
        known = self._link.adapters.still_known(asked.look)
        if not known and self._link.adapters.fingerprint(asked.look) is None:
            self._core.distrust(request_id)
        return known

    @never_raises(default=LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if self._with_adapters and self._await_adapter(req_context.req_id):
            return LookupResult.RETRY
        return _RESULTS[self._core.lookup(req_context.req_id, key)]

    @never_raises()
    def on_schedule_end(self, context: Any) -> None:
        self._link.adapters.keep_fresh(asked.look for asked in self._with_adapters.values())
        self._core.step_ends()

    @never_raises()
    def on_request_finished(self, req_context: Any) -> None:
        self._with_adapters.pop(req_context.req_id, None)
        self._core.end(req_context.req_id)

    # -- jobs --------------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        request = job_metadata.req_context
        rows = zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
        self._core.load(job_metadata.job_id, request.req_id, rows, self._link.step)

    def submit_store(self, job_metadata: Any) -> None:
        request = job_metadata.req_context
        if not self._look_again(request.req_id):
            self._core.refuse_store(job_metadata.job_id, request.req_id, self._link.step)
            return
        rows = zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
        position = request.get_offload_key_position
        self._core.store(job_metadata.job_id, request.req_id, rows, position, self._link.step)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [_result(outcome) for outcome in self._core.finished()]

    @never_raises(default=False)
    def has_pending_work(self) -> bool:
        """vLLM keeps stepping for loads and stores; of a fetch it knows nothing."""
        return self._core.pending

    # -- the engine's life -------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """The one sign of a reset that a tier gets. Blocks for the jobs that run."""
        self._with_adapters.clear()
        self._core.drain()

    def shutdown(self) -> None:
        self._link.adapters.close()
        self._core.close()


def _refuse_others(own: str, tiers: Sequence[Mapping[str, Any]]) -> None:
    """What another tier brings of other weights is in vLLM's caches then, and what is computed on
    it would be stored here as KV of these."""
    others = {str(tier.get("type")) for tier in tiers} - {own}
    if others:
        raise kvw.UsageError(
            f"kvwarehouse cannot be a tier beside {', '.join(sorted(others))}: vLLM's keys say of"
            " KV which tokens it is of, and not which weights, so that a tier that keeps KV beyond"
            " an engine can bring KV of others, and what is computed on it would be stored as KV"
            " of these. Leave one of them out of secondary_tiers",
            code="unsupported",
        )


def _rows_of(view: memoryview) -> Rows:
    """Keeps no view of it: vLLM releases its own, which fails while there are others."""
    shape, strides = view.shape, view.strides
    assert shape is not None
    assert strides is not None
    assert view.contiguous, "vLLM's CPU tier is not one run of rows"
    assert not view.readonly, "vLLM's CPU tier cannot be written"
    address = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
    return Rows(int(address), int(strides[0]))


def _result(outcome: JobOutcome) -> JobResult:
    return JobResult(
        job_id=outcome.job.number,
        success=outcome.complete,
        successful_keys=None if outcome.complete else tuple(c.key for c in outcome.done) or None,
        transfer_time=outcome.seconds,
        transfer_bytes=outcome.size_bytes,
    )

"""KvCacheConnectorManager: what a rank remembers of its connector, and asks of all ranks at
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trtllm_model.collectives import Collectives
from trtllm_model.interface import OldRequestData, RequestData, SchedulerOutput
from trtllm_model.request import LlmRequest, State


class Manager:
    """report_lag: steps that this rank's worker takes longer than it says to report what is
    over."""

    def __init__(
        self, worker: Any, scheduler: Any, ranks: Collectives, revision: str, report_lag: int
    ) -> None:
        assert (scheduler is not None) == (ranks.rank == 0)  # [M-new] __init__
        self.worker = worker
        self.scheduler = scheduler
        self._ranks = ranks
        self._revision = revision
        self._new: tuple[dict[int, LlmRequest], dict[int, LlmRequest]] = ({}, {})
        self._pending: tuple[dict[int, LlmRequest], dict[int, LlmRequest]] = ({}, {})
        self._done: tuple[dict[int, LlmRequest], dict[int, LlmRequest]] = ({}, {})
        self._seen: dict[int, tuple[list[int], list[list[int]]]] = {}
        self._external: dict[int, int] = {}
        self._loaded: set[int] = set()
        self._late: list[tuple[list[int], list[int]]] = [([], [])] * report_lag

    @property
    def new_loading(self) -> dict[int, LlmRequest]:
        return self._new[1]

    def _on_leader(self, ask: Callable[[], Any]) -> Any:
        return self._ranks.broadcast(ask() if self.scheduler is not None else None)

    def query(self, request: LlmRequest, local_tokens: int) -> tuple[int, bool]:
        """[M-new] query_num_new_matched_tokens: no side effects here."""
        assert not request.is_generation_only_request
        tokens, loads_async = self._on_leader(
            lambda: self.scheduler.get_num_new_matched_tokens(request, local_tokens)
        )
        if tokens == 0 and loads_async:
            raise RuntimeError("load_kv_async must be False when num_tokens is 0!")
        # C++ add_sequence: at least one token of the prompt is computed.
        assert tokens >= 0, tokens
        assert local_tokens + tokens < request.prompt_len, (local_tokens, tokens)
        return tokens, loads_async

    def commit(self, request: LlmRequest, tokens: int, loads_async: bool) -> None:
        """[M-new] commit_new_matched_tokens; `tokens` may be less than was offered."""
        if loads_async:
            self._new[1][request.request_id] = request
        self._external[request.request_id] = tokens
        request.model.matched_tokens = tokens

    def allocated(self, request: LlmRequest, tables: list[list[int]], *, grouped: bool) -> None:
        if self.scheduler is None:
            return
        if grouped:
            self.scheduler.update_state_after_alloc_by_layer_group(request, tables)
        else:
            self.scheduler.update_state_after_alloc(request, tables[0])

    def should_add_sequence(self, request: LlmRequest) -> bool:
        return request.request_id not in self._loaded

    def build_scheduler_output(
        self,
        context: Sequence[LlmRequest],
        generation: Sequence[LlmRequest],
        tables: Callable[[LlmRequest], list[list[int]]],
        *,
        grouped: bool,
    ) -> SchedulerOutput:
        output = SchedulerOutput()
        for request in context:
            if request.request_id in self._new[1]:
                continue  # parked: not in the output
            new = request.request_id not in self._seen
            data = self._data(request, tables(request), grouped=grouped)
            data.computed_position -= self._external.get(request.request_id, 0)
            (output.new_requests if new else output.cached_requests).append(data)
        for request in generation:
            output.cached_requests.append(self._data(request, tables(request), grouped=grouped))
        self._external = {}
        return output

    def _data(self, request: LlmRequest, tables: list[list[int]], *, grouped: bool) -> Any:
        """[M-new] update_and_build_data: tokens and blocks since the last time."""
        tokens, blocks = self._seen.setdefault(request.request_id, ([], [[] for _ in tables]))
        new_tokens = request.get_tokens(0)[len(tokens) :]
        new_blocks = [table[len(seen) :] for table, seen in zip(tables, blocks, strict=True)]
        tokens += new_tokens
        for seen, fresh in zip(blocks, new_blocks, strict=True):
            seen += fresh
        if request.model.state in (State.CONTEXT_INIT, State.LOADING):
            position = request.context_current_position
            scheduled = min(request.context_remaining_length, request.context_chunk_size)
        else:
            position, scheduled = len(tokens) - 1, 1
        flat = new_blocks[0] if len(new_blocks) == 1 else []
        if self._revision == "old":
            return OldRequestData(request.request_id, new_tokens, flat, position, scheduled)
        return RequestData(
            request.request_id,
            new_tokens,
            flat,
            position,
            scheduled,
            cache_salt=request.model.salt,
            new_block_ids_by_layer_group=new_blocks if grouped else [],
        )

    def park_loading(self, context: list[LlmRequest]) -> None:
        """[M-new] take_scheduled_requests_pending_load."""
        for request in [r for r in context if r.request_id in self._new[1]]:
            request.model.state = State.LOADING
            context.remove(request)

    def start_batch(self, output: SchedulerOutput) -> None:
        """[E] _kv_connector_start_batch."""
        metadata = self._on_leader(lambda: self.scheduler.build_connector_meta(output))
        self.worker.bind_connector_meta(metadata)
        self.worker.start_load_kv(None)

    def finished(self, request: LlmRequest, tables: list[list[int]], *, grouped: bool) -> bool:
        """[M-new] request_finished: whether the blocks are kept until they are saved."""
        self._loaded.discard(request.request_id)
        name = "request_finished_by_layer_group" if grouped else "request_finished"
        saving = self._on_leader(
            lambda: getattr(self.scheduler, name)(request, tables if grouped else tables[0])
        )
        if saving:
            self._new[0][request.request_id] = request
            request.model.state = State.SAVING
        return bool(saving)

    def reset(self, request: LlmRequest) -> None:
        """[doc] request_reset, [M-new] reset_request_state: the request's blocks are gone."""
        self._seen.pop(request.request_id, None)
        self._external.pop(request.request_id, None)
        self._loaded.discard(request.request_id)
        if self.scheduler is not None and self._revision == "new":
            self.scheduler.request_reset(request)

    def has_pending_transfers(self, name: int) -> bool:
        return any(
            name in requests for both in (self._new, self._pending, self._done) for requests in both
        )

    def get_finished(self) -> list[LlmRequest]:
        """Loads that all ranks report let their requests go on; returns requests whose saves all
        ranks report [M-new]."""
        started = [list(requests) for requests in self._new]
        for kind in (0, 1):
            self._pending[kind].update(self._new[kind])
            self._new[kind].clear()
        self._late.append(self.worker.get_finished(*started))
        over = self._late.pop(0)
        for kind in (0, 1):
            for name in over[kind]:
                # KeyError: the worker reports what it was not handed, or twice.
                self._done[kind][name] = self._pending[kind].pop(name)
        everywhere = self._ranks.allgather([list(requests) for requests in self._done])
        common = [set.intersection(*(set(one[kind]) for one in everywhere)) for kind in (0, 1)]
        for name in sorted(common[1]):
            self._done[1].pop(name).model.state = State.CONTEXT_INIT
            self._loaded.add(name)
        return [self._done[0].pop(name) for name in sorted(common[0])]

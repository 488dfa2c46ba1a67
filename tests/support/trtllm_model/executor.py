"""PyExecutor without overlap: one rank's event loop, a step at a time. Every rank runs the same
steps with the same requests; only what the connector's scheduler says comes from rank 0 [E]."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_model.cache import Cache
from trtllm_model.manager import Manager
from trtllm_model.pools import LAYERS
from trtllm_model.request import LlmRequest, State, Submitted

_RUNNING = (State.CONTEXT_INIT, State.GENERATION)


@dataclass(frozen=True)
class Limits:
    chunk_tokens: int = 1 << 30
    honours: int | None = None
    """V2: of an offer, at most so many tokens are taken; None: as many as the first chunk's blocks
    hold."""


class Executor:
    def __init__(self, cache: Cache, manager: Manager, limits: Limits) -> None:
        self.cache = cache
        self.manager = manager
        self._limits = limits
        self.requests: dict[int, LlmRequest] = {}
        self.matched: dict[int, int] = {}
        """Request to tokens that the connector delivered and the engine took, at its last start."""
        self.local: dict[int, int] = {}
        self.steps = 0

    def submit(self, submitted: Submitted) -> None:
        request = LlmRequest(submitted, self._limits.chunk_tokens)
        assert submitted.request_id not in self.requests
        self.requests[submitted.request_id] = request

    def abort(self, name: int) -> None:
        """[M-new] has_pending_transfers: blocks that a transfer uses stay until it is over."""
        if name in self.requests:
            self.requests[name].model.aborted = True

    def preempt(self, name: int) -> None:
        """V2 takes a running request's blocks away; it begins anew with what it has generated."""
        request = self.requests[name]
        assert request.model.state in _RUNNING
        assert request.model.allocated
        self.cache.release(request, reusable=False)
        self.manager.reset(request)
        request.pause()

    def step(self) -> None:
        self.steps += 1
        context, generation = self._schedule()
        if context or generation:
            output = self.manager.build_scheduler_output(
                context, generation, self.cache.table, grouped=self.cache.grouped
            )
            self.manager.park_loading(context)
            self.manager.start_batch(output)
            if context or generation:
                self._forward(context, generation)
        self._end_requests()
        for request in self.manager.get_finished():
            request.model.state = State.COMPLETE
            self._release(request)

    # -- inside --------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Requests of this step, with blocks. [E] prepare_resources."""
        context, generation = [], []
        for request in self.requests.values():
            state = request.model.state
            if request.model.aborted or state not in _RUNNING:
                continue
            if state is State.GENERATION:
                if self.cache.grow(request, len(request.get_tokens(0))):
                    self.cache.drop_passed(request, len(request.get_tokens(0)) - 1)
                    generation.append(request)
            elif self._admit(request):
                context.append(request)
        return context, generation

    def _admit(self, request: LlmRequest) -> bool:
        if not request.model.allocated:
            if not self.manager.should_add_sequence(request):
                return False
            return (
                self._admit_chunked(request) if self.cache.chunked else self._admit_whole(request)
            )
        if self.cache.chunked:
            end = self._chunk_end(request)
            if not self.cache.grow(request, end):
                return False
            self.cache.drop_passed(request, request.context_current_position)
        return True

    def _admit_whole(self, request: LlmRequest) -> bool:
        """V1: guaranteed not to be evicted; local match, query and blocks in one go [C++
        add_sequence under the radix mutex]."""
        most = request.prompt_len + request.model.left
        if self.cache.room() < -(-most // self.cache.block_tokens):
            return False
        local, blocks = self.cache.local_match(request)
        tokens, loads_async = self.manager.query(request, local)
        self.cache.begin(request, blocks)
        assert self.cache.grow(request, request.prompt_len)
        self._start(request, local, tokens, loads_async)
        return True

    def _admit_chunked(self, request: LlmRequest) -> bool:
        """V2: asked once, and taken up in a later step if there is no room now [doc]."""
        if not request.model.queried:
            request.model.queried = True
            request.offer = self.manager.query(request, 0)  # type: ignore[attr-defined]
        tokens, loads_async = request.offer  # type: ignore[attr-defined]
        honoured = tokens
        if self._limits.honours is not None:
            honoured = min(tokens, self._limits.honours)
        self.cache.begin(request, [])
        end = min(request.prompt_len, honoured + self._limits.chunk_tokens)
        if not self.cache.grow(request, end):
            self.cache.tables.pop(request.request_id)
            return False
        self.cache.drop_passed(request, honoured)
        request.py_num_connector_matched_tokens = honoured  # type: ignore[attr-defined]
        self._start(request, 0, honoured, loads_async)
        return True

    def _start(self, request: LlmRequest, local: int, tokens: int, loads_async: bool) -> None:
        self.manager.commit(request, tokens, loads_async)
        request.model.allocated = True
        request.context_current_position = local + tokens
        self.local[request.request_id], self.matched[request.request_id] = local, tokens
        self.manager.allocated(request, self.cache.table(request), grouped=self.cache.grouped)

    def _chunk_end(self, request: LlmRequest) -> int:
        begin = request.context_current_position
        return begin + min(request.context_remaining_length, request.context_chunk_size)

    def _forward(self, context: list[LlmRequest], generation: list[LlmRequest]) -> None:
        worker = self.manager.worker
        for layer in range(LAYERS):
            worker.wait_for_layer_load(layer, None)
            worker.save_kv_layer(layer, None)
        for request in context:
            begin, end = request.context_current_position, self._chunk_end(request)
            self.cache.compute(request, begin, end)
        for request in generation:
            end = len(request.get_tokens(0))
            self.cache.compute(request, end - 1, end)
        worker.wait_for_save(None)
        for request in context:
            request.context_current_position = self._chunk_end(request)
            if not request.context_remaining_length:
                request.model.state = State.GENERATION
                self._sample(request)
        for request in generation:
            self._sample(request)

    def _sample(self, request: LlmRequest) -> None:
        tokens = request.get_tokens(0)
        request.add_new_token((tokens[-1] * 31 + len(tokens)) % 50_000)
        request.model.left -= 1

    def _end_requests(self) -> None:
        for request in list(self.requests.values()):
            model = request.model
            ended = model.state is State.GENERATION and model.left <= 0
            if not (ended or model.aborted) or model.state in (State.SAVING, State.COMPLETE):
                continue
            if self.manager.has_pending_transfers(request.request_id):
                continue  # a load writes its blocks still
            if not model.allocated:
                if model.queried:
                    self.manager.reset(request)
                del self.requests[request.request_id]
                continue
            tables = self.cache.table(request)
            if not self.manager.finished(request, tables, grouped=self.cache.grouped):
                model.state = State.COMPLETE
                self._release(request)

    def _release(self, request: LlmRequest) -> None:
        self.cache.release(request, reusable=not request.model.aborted)
        del self.requests[request.request_id]

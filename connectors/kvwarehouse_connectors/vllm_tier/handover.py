"""What the connector hands to the tiers that vLLM makes for it, which vLLM tells nothing of the
weights, of a request's adapter or of what lies where in a row.

Weights may change while the engine runs, and each worker sees that in the order of its steps
(vllm/weights_watch.py). All KV of vLLM's caches was computed in some step, and is of the weights of
the keys if they were right in every step since those caches were empty. So what a tier is given to
store waits for the verdict on the step that was made last, and what it has loaded for vLLM for the
one on the step that began the load.

vLLM makes the tiers inside the connector's constructor, in its thread: there they find it in a
context variable. Belongs to the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from kvwarehouse_connectors.core.hooks import never_raises
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.adapters import AdapterLook, Adapters
from kvwarehouse_connectors.vllm.weights_watch import CacheEpochs
from kvwarehouse_connectors.vllm.wishes import LOAD, STORE, switch
from kvwarehouse_connectors.vllm_tier.rank_rows import RankRows
from kvwarehouse_connectors.vllm_tier.steps import StepVerdict
from kvwarehouse_connectors.vllm_tier.tier_core import RequestFacts

_NOTHING = RequestFacts(loads=False, stores=False)


class LinkedTier(Protocol):
    def rows_known(self, ranks: Sequence[RankRows]) -> None:
        """Once: how the workers' KV lies."""

    def weights_known(self, step: int) -> None:
        """They were right up to this step, or `forget` was called before."""

    def forget(self) -> None:
        """Keys are to be made anew, and what began before is not to be trusted."""

    @property
    def loading(self) -> bool: ...


class EngineLink:
    """One per engine, in the scheduler's process."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.tiers: list[LinkedTier] = []
        self.epochs = CacheEpochs()
        self.step = -1
        """That is being made, or was made last."""
        self.adapters = Adapters()
        self._ranks = int(vllm_config.parallel_config.world_size)
        self._current: tuple[str, RequestFacts, AdapterLook | None] = ("", _NOTHING, None)

    @never_raises()
    def begin(self, request: Any) -> None:
        """Before the tiers hear of a request."""
        self._current = (request.request_id, _NOTHING, None)
        look = self.adapters.look(request.lora_request)
        # Tokens of a session may be taken back, and media may have names of their own.
        named = compat.own_media(request, self.vllm_config)
        if self.epochs.mixed or request.resumable or named:
            return
        params = request.kv_transfer_params
        facts = RequestFacts(loads=switch(params, LOAD), stores=switch(params, STORE))
        self._current = (request.request_id, facts, look)

    def facts(self, request_id: str) -> tuple[RequestFacts, AdapterLook | None]:
        """Of the request that the tiers hear of now; another one's has nothing to do with them.
        With a look at its adapter they hold once that is known; its fingerprint is then the twist.
        """
        known, facts, look = self._current
        return (facts, look) if known == request_id else (_NOTHING, None)

    @never_raises()
    def ended(self, request: Any) -> None:
        self.adapters.used(request)

    @never_raises()
    def step_begins(self) -> None:
        """Before the tiers hear of a step's work."""
        self.step += 1
        self.epochs.was_reset(alone=True)  # vLLM's CPU tier keeps what it has

    @never_raises()
    def take(self, verdict: StepVerdict) -> None:
        """With each step's results, before the tiers hear of those."""
        if self.epochs.take(verdict.news):
            for tier in self.tiers:
                tier.forget()
        if verdict.ranks == self._ranks:
            for tier in self.tiers:
                tier.weights_known(verdict.judged)

    def was_reset(self) -> None:
        """After the tiers were drained, and vLLM's CPU tier is empty. vLLM's cache is, too, unless
        requests have blocks of it."""
        if self.epochs.was_reset():
            self.adapters.forget()
        self.epochs.begin()


_LINK: ContextVar[EngineLink | None] = ContextVar("kvwarehouse_engine_link", default=None)


@contextmanager
def handed_over(link: EngineLink | None) -> Iterator[None]:
    token = _LINK.set(link)
    try:
        yield
    finally:
        _LINK.reset(token)


def current_link() -> EngineLink | None:
    return _LINK.get()

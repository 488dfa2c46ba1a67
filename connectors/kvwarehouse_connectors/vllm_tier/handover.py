"""What the connector hands to the tiers that vLLM makes for it, which vLLM tells nothing of the
weights, of a request's adapter or of what lies where in a row.

vLLM makes the tiers inside the connector's constructor, in its thread: there they find it in a
context variable. Belongs to the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kvwarehouse_connectors.core.hooks import never_raises
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.adapters import Adapters
from kvwarehouse_connectors.vllm.wishes import LOAD, STORE, switch
from kvwarehouse_connectors.vllm_tier.rank_rows import RankRows
from kvwarehouse_connectors.vllm_tier.tier_core import RequestFacts

_NOTHING = RequestFacts(loads=False, stores=False)


class EngineLink:
    """One per engine, in the scheduler's process."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.tiers: list[Callable[[Sequence[RankRows]], None]] = []
        """Each is told of the workers' rows, once."""
        self._adapters = Adapters()
        self._current: tuple[str, RequestFacts] = ("", _NOTHING)

    @never_raises()
    def begin(self, request: Any) -> None:
        """Before the tiers hear of a request."""
        self._current = (request.request_id, _NOTHING)
        adapter = self._adapters.fingerprint(request.lora_request)
        # Tokens of a session may be taken back, and media may have names of their own.
        if adapter is None or request.resumable or compat.own_media(request):
            return
        params = request.kv_transfer_params
        facts = RequestFacts(adapter, switch(params, LOAD), switch(params, STORE))
        self._current = (request.request_id, facts)

    def facts(self, request_id: str) -> RequestFacts:
        """Of the request that the tiers hear of now; another one's has nothing to do with them."""
        known, facts = self._current
        return facts if known == request_id else _NOTHING

    def forget_adapters(self) -> None:
        """The engine's cache was reset, with all blocks of earlier adapters in it."""
        self._adapters.forget()


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

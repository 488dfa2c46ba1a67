"""What the halves of the connector tell each other with each step, beside what vLLM's own tell:
which step it is, and whether the weights were those that keys stand for.

Steps are counted by the scheduler's half. Belongs to the thread of its half. Pickled by vLLM.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvwarehouse_connectors.core.live_weights import LiveWeights
from kvwarehouse_connectors.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from kvwarehouse_connectors.vllm.weights_watch import Ticket, WeightsNews, WeightsWatch

_log = logging.getLogger(__name__)

_WANTED = (
    "Reset the connector with it when no request runs: vLLM's CPU tier has such KV, too."
    " llm.reset_prefix_cache(reset_connector=True), POST /reset_prefix_cache?reset_external=true"
)


@dataclass
class WatchedStep(KVConnectorMetadata):
    """One step's work. vllm: vLLM's own. epoch, resets: see weights_watch.py; a reset is one of
    vLLM's cache and of its CPU tier at once."""

    vllm: Any
    number: int
    epoch: int
    resets: int
    idle: bool = False
    """Whether it computes, loads and stores nothing, and no tier loads: see vllm/messages.py."""


@dataclass
class StepVerdict(KVConnectorWorkerMetadata):
    """With each step, of one rank or, aggregated, of all. vllm: vLLM's own."""

    vllm: Any
    judged: int
    """The weights are known of the steps up to this one: they were right, or the news say not."""
    news: WeightsNews
    ranks: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepVerdict:
        assert isinstance(other, StepVerdict)
        vllm = self.vllm or other.vllm
        if self.vllm and other.vllm:
            vllm = self.vllm.aggregate(other.vllm)
        return StepVerdict(
            vllm,
            min(self.judged, other.judged),
            self.news.and_also(other.news),
            self.ranks + other.ranks,
        )


class StepWatch:
    """Of one rank. Never raises and never waits."""

    def __init__(self, weights: LiveWeights) -> None:
        self._watch = WeightsWatch(weights, self._hear, _WANTED)
        self._news = WeightsNews()
        self._open: deque[tuple[int, Ticket]] = deque()
        self._judged = -1
        self._failed = False

    def step(self, step: WatchedStep) -> None:
        """Of every step, in their order, before it computes. The weights of an idle one are those
        of the step before."""
        if step.idle:
            self._inherit(step.number)
            return
        try:
            self._open.append((step.number, self._watch.step(step.epoch, step.resets)))
        except Exception:  # noqa: BLE001 - the engine's edge
            # Unknown is as bad as different, and does not become known later.
            self._hear(WeightsNews(step.epoch + 1, step.resets))
            if not self._failed:
                _log.exception(
                    "kvwarehouse: the weights could not be read; nothing is loaded or stored. %s",
                    _WANTED,
                )
            self._failed = True

    def _inherit(self, number: int) -> None:
        if self._open:
            self._open.append((number, self._open[-1][1]))
        else:
            self._judged = number

    def verdict(self, vllm: Any) -> StepVerdict:
        """vllm: vLLM's own part of the message."""
        self._watch.look()
        while self._open and self._open[0][1].good is not None:
            self._judged, _ = self._open.popleft()
        return StepVerdict(vllm, self._judged, self._news)

    def _hear(self, news: WeightsNews) -> None:
        self._news = self._news.and_also(news)

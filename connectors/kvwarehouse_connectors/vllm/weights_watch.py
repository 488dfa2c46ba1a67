"""Sees that an engine's weights change while it runs, and keeps KV of the one apart from KV of the
other.

vLLM changes weights in place (`reload_weights`, a trainer's update, a wake from sleep) and tells no
connector. So each step's work carries a sample of the weights, taken on the device in the order of
the steps, and nothing is loaded or stored before the sample is known to be as it should.

What the two halves count:
- resets: of vLLM's own prefix cache, plain ones too. KV that is computed after one depends on
  nothing from before it.
- epoch: how often keys were made anew, so that nothing stored before is found by this engine again,
  and nothing stored since by any other. Rises with a reset of the connector, and with new weights.

Weights that differ in the first step after a reset are new, and all KV from there on is theirs: a
new epoch. Weights that differ later have KV of both in the engine's cache: nothing is loaded or
stored until the next reset.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

from kvwarehouse_connectors.core.live_weights import LiveWeights, WeightsSample

_log = logging.getLogger(__name__)

_WANTED = (
    "Reset the prefix cache when no request runs: llm.reset_prefix_cache(), POST"
    " /reset_prefix_cache"
)


@dataclass
class Ticket:
    """One step of one rank. good: whether its loads and stores are of the weights that their keys
    stand for; None: not known yet."""

    sample: WeightsSample
    epoch: int
    resets: int
    good: bool | None = None


@dataclass(frozen=True)
class WeightsNews:
    """What a rank saw, for the scheduler's half; of several ranks, the highest."""

    least_epoch: int = 0
    """Keys of earlier epochs are refused."""
    mixed_resets: int = -1
    """While there were so many resets, the cache has KV of several weights."""

    def __bool__(self) -> bool:
        return self != WeightsNews()

    def and_also(self, other: WeightsNews) -> WeightsNews:
        return WeightsNews(
            max(self.least_epoch, other.least_epoch), max(self.mixed_resets, other.mixed_resets)
        )


class WeightsWatch:
    """Of one rank. `step` is called in the engine's thread, all else in any. The weights at the
    beginning are those that the engine's fingerprint is of."""

    def __init__(self, weights: LiveWeights) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._reference = weights.sample()
        self._resets = -1
        self._epoch = 0
        self._least_epoch = 0
        self._mixed = False
        self._open: deque[Ticket] = deque()
        self._news = WeightsNews()

    def step(self, epoch: int, resets: int) -> Ticket:
        """Of every step that computes, in their order, before it does. Waits for nothing."""
        ticket = Ticket(self._weights.sample(), epoch, resets)
        with self._lock:
            self._open.append(ticket)
            while self._open and self._open[0].sample.ready:
                self._judge(self._open.popleft())
        return ticket

    def good(self, ticket: Ticket) -> bool:
        """Waits until the device has come to the ticket's step."""
        # Not under the lock, which the engine's thread takes. Earlier tickets are then ready too.
        ticket.sample.wait()
        with self._lock:
            while ticket.good is None:
                self._judge(self._open.popleft())
            return ticket.good

    def take_news(self) -> WeightsNews:
        """Since they were last taken."""
        with self._lock:
            news, self._news = self._news, WeightsNews()
        return news

    def _judge(self, ticket: Ticket) -> None:
        same = ticket.sample.same_as(self._reference)
        if ticket.resets > self._resets:
            if not same and not self._mixed:
                self._least_epoch = self._epoch + 1
                _log.info(
                    "kvwarehouse: the engine has other weights than at its last reset. What it"
                    " stored before is not loaded any more, and what it stores is its own: KV is"
                    " shared again after a restart"
                )
            if not same:
                self._reference = ticket.sample
            self._mixed = False
            self._resets = ticket.resets
        elif not same and not self._mixed:
            self._mixed = True
            self._least_epoch = ticket.epoch + 1
            self._tell(WeightsNews(self._least_epoch, ticket.resets))
            _log.warning(
                "kvwarehouse: the weights have changed while the engine's prefix cache holds KV of"
                " the old ones, which vLLM goes on to use. Nothing is loaded or stored until that"
                " cache is reset. %s",
                _WANTED,
            )
        self._epoch = ticket.epoch
        ticket.good = not self._mixed and ticket.epoch >= self._least_epoch
        if not self._mixed and not ticket.good:
            self._tell(WeightsNews(self._least_epoch))

    def _tell(self, news: WeightsNews) -> None:
        self._news = self._news.and_also(news)

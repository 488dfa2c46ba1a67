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
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvwarehouse_connectors.core.live_weights import LiveWeights, WeightsSample
from kvwarehouse_connectors.vllm import compat

_log = logging.getLogger(__name__)

_TENSORS = 96
_WANTED = (
    "Reset the prefix cache when no request runs: llm.reset_prefix_cache(), POST"
    " /reset_prefix_cache"
)


def live_weights(vllm_config: Any, models: Sequence[torch.nn.Module]) -> LiveWeights:
    """To watch those of an engine's models. Raises UsageError (code "no_weights") where they cannot
    be read."""
    moving = compat.moving_tensors(vllm_config, models)
    return LiveWeights(torch.nn.ModuleList(models), _TENSORS, moving)


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

    def and_also(self, other: WeightsNews) -> WeightsNews:
        return WeightsNews(
            max(self.least_epoch, other.least_epoch), max(self.mixed_resets, other.mixed_resets)
        )


class CacheEpochs:
    """The scheduler's half, in its thread: what keys and KV of the engine's caches are of now."""

    def __init__(self) -> None:
        self.resets = 0
        self.epoch = 0
        self.twist = b""
        """Of the keys of this epoch."""
        self._mixed_resets = -1
        self._manager: Any = None
        self._content: Any = None

    def watch(self, cache_manager: Any) -> None:
        """vLLM's own, of whose cache a plain reset is seen: it calls no hook."""
        self._manager = cache_manager
        self._content = compat.cache_content(cache_manager)

    @property
    def mixed(self) -> bool:
        """Whether the engine's cache has KV of several weights."""
        return self._mixed_resets >= self.resets

    def was_reset(self, *, alone: bool = False) -> bool:
        """Whether vLLM's cache was reset since this was last asked. alone: KV of before is
        elsewhere, so that it counts as none."""
        content = compat.cache_content(self._manager)
        if content is self._content:
            return False
        self._content = content
        self.resets += not alone
        return True

    def take(self, news: WeightsNews) -> bool:
        """Whether a new epoch begins."""
        self._mixed_resets = max(self._mixed_resets, news.mixed_resets)
        if self.epoch >= news.least_epoch:
            return False
        self.begin()
        return True

    def begin(self) -> None:
        """A new epoch."""
        self.epoch += 1
        self.twist = os.urandom(16)


class WeightsWatch:
    """Of one rank. `step` is called in the engine's thread, `good`, `look` and `tell` in any. The
    weights at the beginning are those that the engine's fingerprint is of. tell: takes news for the
    scheduler's half. wanted: what the log asks for when weights change without a reset."""

    def __init__(
        self, weights: LiveWeights, tell: Callable[[WeightsNews], None], wanted: str = _WANTED
    ) -> None:
        self._weights = weights
        self._tell = tell
        self._wanted = wanted
        self._lock = threading.Lock()
        self._reference = weights.sample()
        self._resets = -1
        self._epoch = 0
        self._least_epoch = 0
        self._mixed = False
        self._open: deque[Ticket] = deque()

    def step(self, epoch: int, resets: int) -> Ticket:
        """Of every step that computes, loads or stores, in their order, before it does, and of no
        other: while an engine sleeps its weights cannot be read. Waits for nothing."""
        ticket = Ticket(self._weights.sample(), epoch, resets)
        with self._lock:
            self._open.append(ticket)
        self.look()
        return ticket

    def look(self) -> None:
        """Judges the tickets to which the device has come."""
        with self._lock:
            while self._open and self._open[0].sample.ready:
                self._judge(self._open.popleft())

    def good(self, ticket: Ticket) -> bool:
        """Waits until the device has come to the ticket's step."""
        # Not under the lock, which the engine's thread takes. Earlier tickets are then ready too.
        ticket.sample.wait()
        with self._lock:
            while ticket.good is None:
                self._judge(self._open.popleft())
            return ticket.good

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
                self._wanted,
            )
        self._epoch = ticket.epoch
        ticket.good = not self._mixed and ticket.epoch >= self._least_epoch
        if not self._mixed and not ticket.good:
            self._tell(WeightsNews(self._least_epoch))

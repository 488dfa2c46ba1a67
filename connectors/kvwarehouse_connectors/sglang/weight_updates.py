"""How often the weights of the engine in this process were written to, as its hooks tell.

SGLang tells its storage backend nothing of updates. So hooks stand before everything that writes
to weights or takes them out of memory (plugin.py puts them there), and count here. They run in the
scheduler's thread, which is where weights are written; readers may be of any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

# Of SGLang's `check_weights`; another action may write.
_READS_ONLY = ("snapshot", "compare", "checksum")
_WEIGHTS = "weights"


class WeightUpdates:
    """Read without a lock: each field is written in one thread, before the weights are."""

    def __init__(self) -> None:
        self.writes = 0
        """Updates begun, whatever became of them: one that failed may have written a part."""
        self.away = False
        """Whether the weights are out of memory."""
        self.watched = False
        """Whether anybody wants to know if weights that come back are those that went away."""
        self._writes_at_flush = 0
        self._named: tuple[str, int] | None = None
        self._digest: bytes | None = None

    @property
    def stale(self) -> bool:
        """Whether the engine may have KV of earlier weights."""
        return self.writes != self._writes_at_flush

    def named(self, weights: str) -> bool:
        """That a backend is attached which calls them so. Returns False where the backend before it
        called others so."""
        if self._named is not None and self._named[0] == weights:
            return self._named[1] == self.writes
        self._named = weights, self.writes
        return True

    def written(self) -> None:
        self.writes += 1

    def flushed(self) -> None:
        self._writes_at_flush = self.writes

    def go_away(self, model: Any) -> None:
        self._digest = self._digest_of(model)
        self.away = True

    def come_back(self, model: Any) -> None:
        """Weights that were kept elsewhere meanwhile are the same; their memory alone is not."""
        if self._digest is None or self._digest_of(model) != self._digest:
            self.writes += 1
        self.away = False

    def _digest_of(self, model: Any) -> bytes | None:
        """None where it cannot be known, which equals nothing. The weights are in memory, and
        nobody writes to them: the engine is idle, and this is its scheduler's thread."""
        if not self.watched:
            return None
        try:
            from kvwarehouse_connectors.core.live_weights import LiveWeights

            return LiveWeights(model).digest()
        except Exception as error:  # noqa: BLE001 - the engine's edge: then they count as others
            _log.warning("kvwarehouse: the weights cannot be looked at: %s", error)
            return None


UPDATES = WeightUpdates()
"""Of this process, which has one engine."""


class ProbedError(Exception):
    """Raised by a hook that is in its place, before what it stands before is called."""


PROBE = object()
"""Given in the place of SGLang's object."""


def before_write(subject: Any, *_: Any, **__: Any) -> None:
    _answer(subject)
    UPDATES.written()


def before_check(subject: Any, action: str = "", *_: Any, **__: Any) -> None:
    _answer(subject)
    if action not in _READS_ONLY:
        UPDATES.written()


def around_flush(flush: Callable[..., bool], subject: Any, *given: Any, **named: Any) -> bool:
    _answer(subject)
    done = flush(subject, *given, **named)
    if done:
        UPDATES.flushed()
    return done


def before_release(subject: Any, request: Any, *_: Any, **__: Any) -> None:
    _answer(subject)
    if _has_weights(request):
        UPDATES.go_away(_model(subject))


def around_resume(
    resume: Callable[..., Any], subject: Any, request: Any, *given: Any, **named: Any
) -> Any:
    _answer(subject)
    result = resume(subject, request, *given, **named)
    if _has_weights(request):
        UPDATES.come_back(_model(subject))
    return result


def _answer(subject: Any) -> None:
    if subject is PROBE:
        raise ProbedError


def _has_weights(request: Any) -> bool:
    return not request.tags or _WEIGHTS in request.tags


def _model(subject: Any) -> Any:
    return subject.tp_worker.model_runner.model

"""The edge between an engine and a connector: whatever goes wrong in a hook ends there, logged, and
the engine goes on. Stateless.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def answers(default: Callable[[], Any]) -> Callable[[_F], _F]:
    """A hook that never raises into the engine: it answers `default()` instead."""

    def wrap(hook: _F) -> _F:
        log = logging.getLogger(hook.__module__)

        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                log.exception("kvwarehouse: %s failed; the engine goes on", hook.__name__)
                return default()

        return guarded  # type: ignore[return-value]

    return wrap


def nothing() -> None:
    return None

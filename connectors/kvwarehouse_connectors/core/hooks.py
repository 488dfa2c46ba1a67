"""The edge between an engine and a connector: an error in a hook is logged there, and the engine
goes on. Stateless.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def never_raises(
    default: Any = None, *, default_factory: Callable[[], Any] | None = None
) -> Callable[[_F], _F]:
    """Makes a hook that logs an error and returns `default` instead of raising it into the engine.
    default_factory: makes the default anew each time, where that is mutable."""

    def wrap(hook: _F) -> _F:
        log = logging.getLogger(hook.__module__)

        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                log.exception("kvwarehouse: %s failed; the engine goes on", hook.__name__)
                return default_factory() if default_factory else default

        return guarded  # type: ignore[return-value]

    return wrap

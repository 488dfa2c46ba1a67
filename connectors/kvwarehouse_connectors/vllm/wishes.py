"""A request's own wishes, in its kv_transfer_params beside what others have there. Misspelt ones
are counted and logged: a request that is not to be stored should not be stored in silence.

Not thread-safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvwarehouse_connectors.vllm.handoff import RECORD

_log = logging.getLogger(__name__)

LOAD = "kvwarehouse.load"
STORE = "kvwarehouse.store"
HANDOFF = "kvwarehouse.handoff"
RELEASE = "kvwarehouse.release"
"""Switches: two are on unless a request turns them off, two are off unless it says true."""

_SWITCHES = (LOAD, STORE)
_ASKED = (HANDOFF, RELEASE)
_NO = ("false", "no", "off", "0")
_YES = ("true", "yes", "on", "1")
_LONGEST = max(map(len, _NO + _YES))
# Strangers choose the names: only so many are logged, and only so much of each.
_MOST_LOGGED = 32
_LOGGED_CHARACTERS = 60


def switch(params: Mapping[str, Any] | None, name: str) -> bool:
    """What a request says of LOAD or STORE; anything but a no means yes."""
    return params is None or _word(params.get(name)) not in _NO


def asked(params: Mapping[str, Any] | None, name: str) -> bool:
    """What a request says of HANDOFF or RELEASE; anything but true means no."""
    return params is not None and params.get(name) is True


class UnknownWishes:
    """count: adds to a counter of stats.py."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._logged: set[str] = set()

    def look_for(self, params: Mapping[str, Any] | None) -> None:
        """Counts names that are none of ours though they begin so, and values that are no
        switch's."""
        for name, value in (params or {}).items():
            if not str(name).startswith(RECORD) or name == RECORD or _is_understood(name, value):
                continue
            self._count("unknown_wishes")
            if len(self._logged) >= _MOST_LOGGED or name in self._logged:
                continue
            self._logged.add(name)
            _log.warning(
                "a request's kv_transfer_params have %s: %s, which means nothing here. There are"
                " %s, %s, %s and %s, each true or false. Further requests that say so are counted"
                " in unknown_wishes",
                *(repr(part)[:_LOGGED_CHARACTERS] for part in (name, value)),
                *_SWITCHES,
                *_ASKED,
            )


def _is_understood(name: str, value: Any) -> bool:
    if name in _SWITCHES:
        return value is None or _word(value) in _NO + _YES
    return name in _ASKED and (value is None or isinstance(value, bool))


def _word(value: Any) -> str:
    """A value as a word of yes or no; "" for what is none."""
    if not isinstance(value, (bool, int, str)):
        return ""
    word = str(value) if isinstance(value, (bool, int)) else value[: _LONGEST + 1]
    return word.lower()

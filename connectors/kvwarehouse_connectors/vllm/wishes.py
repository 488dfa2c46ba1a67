"""A request's own wishes, in its kv_transfer_params beside what others have there. Misspelt ones
are counted and logged: a request that is not to be stored should not be stored in silence.

Not thread-safe.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeGuard

from kvwarehouse_connectors.vllm.handoff import RECORD

_log = logging.getLogger(__name__)

LOAD = "kvwarehouse.load"
STORE = "kvwarehouse.store"
HANDOFF = "kvwarehouse.handoff"
RELEASE = "kvwarehouse.release"
"""Switches: two are on unless a request turns them off, two are off unless it says true."""
KEEP_S = "kvwarehouse.keep_s"
KEEP_AS = "kvwarehouse.keep_as"
"""For how many seconds what is stored of it stays after its end, and by which name: a later request
of the same name takes its place."""

_SWITCHES = (LOAD, STORE)
_ASKED = (HANDOFF, RELEASE)
_NO = ("false", "no", "off", "0")
_YES = ("true", "yes", "on", "1")
_LONGEST = max(map(len, _NO + _YES))
# As client.keep() takes them.
_KEEP_S = (1, 366 * 86_400)
_NAME_BYTES = 200
# Strangers choose the names: only so many are logged, and only so much of each.
_MOST_LOGGED = 32
_LOGGED_CHARACTERS = 60


def switch(params: Mapping[str, Any] | None, name: str) -> bool:
    """What a request says of LOAD or STORE; anything but a no means yes."""
    return params is None or _word(params.get(name)) not in _NO


def asked(params: Mapping[str, Any] | None, name: str) -> bool:
    """What a request says of HANDOFF or RELEASE; anything but true means no."""
    return params is not None and params.get(name) is True


def keep_s(params: Mapping[str, Any] | None, limit_s: float) -> float:
    """At most limit_s; 0: nothing is to be kept."""
    value = params.get(KEEP_S) if params is not None else None
    return min(float(value), limit_s) if _is_time(value) else 0.0


def keep_as(params: Mapping[str, Any] | None, request_id: str, salt: str | None) -> str:
    """By the name that it says, else by the request's id, where that can be one. No request names
    what an operator keeps, or what a request of another salt does."""
    names = (params.get(KEEP_AS) if params is not None else None, request_id)
    own = next(filter(_is_name, names), secrets.token_hex(8))
    apart = f"{blake2b(salt.encode(), digest_size=4).hexdigest()}:" if salt else ""
    return f"request:{apart}{own}"


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
                " %s, %s, %s and %s, each true or false, %s, a number, and %s, a name. Further"
                " requests that say so are counted in unknown_wishes",
                *(repr(part)[:_LOGGED_CHARACTERS] for part in (name, value)),
                *_SWITCHES,
                *_ASKED,
                KEEP_S,
                KEEP_AS,
            )


def _is_understood(name: str, value: Any) -> bool:
    if name in _SWITCHES:
        return value is None or _word(value) in _NO + _YES
    if name == KEEP_S:
        return value is None or _is_time(value)
    if name == KEEP_AS:
        return value is None or _is_name(value)
    return name in _ASKED and (value is None or isinstance(value, bool))


def _is_time(value: Any) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return _KEEP_S[0] <= value <= _KEEP_S[1]


def _is_name(value: Any) -> TypeGuard[str]:
    if not isinstance(value, str) or not value or not value.isprintable():
        return False
    return len(value.encode("utf-8", "replace")) <= _NAME_BYTES


def _word(value: Any) -> str:
    """A value as a word of yes or no; "" for what is none."""
    if not isinstance(value, (bool, int, str)):
        return ""
    word = str(value) if isinstance(value, (bool, int)) else value[: _LONGEST + 1]
    return word.lower()

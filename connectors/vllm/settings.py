"""What `kv_connector_extra_config` may say: read once, checked, frozen.

Unknown names that begin with "kvwarehouse." refuse the start: a misspelt setting is not a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import kvwarehouse as kvw

PREFIX = "kvwarehouse."

MODES = ("read_write", "read_only", "write_only")
ROLES = ("kv_both", "kv_producer", "kv_consumer")


@dataclass(frozen=True)
class Settings:
    """Each is `kvwarehouse.NAME` in kv_connector_extra_config."""

    address: str = ""
    """The daemon of this host, unix:///path. Default: $KVW_ADDRESS, else this user's own socket."""
    mode: str = "read_write"
    """read_write, read_only (loads, stores nothing) or write_only."""
    verify: str = "always"
    """always: every page's digest; boundary: only of pages from NVMe or of an earlier daemon."""
    weights: str = ""
    """A fingerprint of the weights, where they are not files that can be read (or are dummies)."""
    salt: str = ""
    """Separates those who must not share KV, such as tenants with engines of their own."""
    staging_bytes: int = 256 << 20
    """Host memory of each worker for pages on their way out. Full: the newest are not stored."""
    load: str = "worth"
    """worth: what is loaded faster than computed; always: whatever is stored."""
    load_timeout_s: float = 5.0
    """Bound of one request's load, whatever the schedule."""
    store_timeout_s: float = 5.0
    """Bound of one step's store, behind the engine."""
    handoff_wait_s: float = 2.0
    """How long a request waits for pages that another engine said it stores."""
    prefill_tokens_per_s: float = 0.0
    """This engine's prefill rate until it has measured it; 0: a guess from the device."""
    store_generated: bool = True
    """Whether blocks of generated tokens are stored too, for the next turn."""

    @property
    def loads(self) -> bool:
        return self.mode != "write_only"

    @property
    def stores(self) -> bool:
        return self.mode != "read_only"


def read_settings(extra: Mapping[str, Any], role: str) -> Settings:
    """role: vLLM's kv_role; vLLM does not enforce it, this does. A producer loads nothing, a
    consumer stores nothing. Raises UsageError (code "bad_setting") naming the setting."""
    given = {
        name.removeprefix(PREFIX): value for name, value in extra.items() if name.startswith(PREFIX)
    }
    known = {field.name for field in fields(Settings)}
    for name in given:
        if name not in known:
            raise _bad(name, given[name], f"is unknown; known are {', '.join(sorted(known))}")
    values = {name: _CHECKS[name](name, value) for name, value in given.items()}
    settings = Settings(**values)
    address = settings.address or kvw.default_address()
    return replace(settings, address=address, mode=_mode(settings.mode, role))


def _mode(mode: str, role: str) -> str:
    if role == "kv_producer" and mode == "read_only":
        raise _bad("mode", mode, "does not go with kv_role kv_producer, which stores")
    if role == "kv_consumer" and mode == "write_only":
        raise _bad("mode", mode, "does not go with kv_role kv_consumer, which loads")
    return {"kv_producer": "write_only", "kv_consumer": "read_only"}.get(role, mode)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(name, value, "is not text")
    return value


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in allowed:
            raise _bad(name, value, f"is not one of {', '.join(allowed)}")
        return str(value)

    return check


def _size(name: str, value: Any) -> int:
    size = kvw.parse_size(value, name=PREFIX + name)
    if not 1 << 20 <= size <= 1 << 40:
        raise _bad(name, value, "is out of range; use 1MiB to 1TiB")
    return size


def _number(least: float, most: float) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _bad(name, value, "is not a number")
        if not least <= value <= most:
            raise _bad(name, value, f"is out of range; use {least:g} to {most:g}")
        return float(value)

    return check


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "is not true or false")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "address": _text,
    "mode": _one_of(*MODES),
    "verify": _one_of("always", "boundary"),
    "weights": _text,
    "salt": _text,
    "staging_bytes": _size,
    "load": _one_of("worth", "always"),
    "load_timeout_s": _number(0.001, 600),
    "store_timeout_s": _number(0.001, 600),
    "handoff_wait_s": _number(0, 60),
    "prefill_tokens_per_s": _number(0, 1e9),
    "store_generated": _truth,
}


def _bad(name: str, value: Any, problem: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"kv_connector_extra_config: {PREFIX}{name} = {value!r} {problem}",
        code="bad_setting",
        context={"setting": name, "value": value},
    )

"""What server_url and the environment may say: read once, checked, frozen.

TensorRT-LLM has no place for a connector's own settings, and passes on only environment variables
that begin with TLLM. Unknown names that begin with TLLM_KVW_ refuse the start: a misspelt setting
is not a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import kvwarehouse as kvw

PREFIX = "TLLM_KVW_"
MODES = ("read_write", "read_only", "write_only")


@dataclass(frozen=True)
class Settings:
    """Each is TLLM_KVW_NAME in the environment, in capitals."""

    address: str = ""
    """The daemon of this host, unix:///path. Default: server_url of kv_connector_config, else
    $KVW_ADDRESS, else this user's own socket."""
    mode: str = "read_write"
    """read_write, read_only (loads, stores nothing) or write_only."""
    verify: str = "always"
    """always: every page's digest; boundary: only of pages of an earlier daemon."""
    weights: str = ""
    """A fingerprint of the weights, where they are not files that can be read (or are dummies)."""
    salt: str = ""
    """Separates those who must not share KV, such as tenants with engines of their own."""
    staging_bytes: int = 256 << 20
    """Host memory of each rank for pages on their way out. Full: the newest are not stored."""
    load: str = "async"
    """async: a request waits for its pages while others go on; sync: the step waits."""
    lookup_budget_s: float = 0.01
    """How long a lookup may hold the engine's thread to verify pages before it promises them."""
    load_timeout_s: float = 10.0
    """How long a promised load is tried again before it fails the engine."""
    store_timeout_s: float = 5.0
    """Bound of one step's store, behind the engine."""
    hold_s: float = 1.0
    """How long blocks of a finished request are held that could not be copied in time; 0: never."""
    store_generated: bool = True
    """Whether blocks of generated tokens are stored too, for the next turn."""

    @property
    def loads(self) -> bool:
        return self.mode != "write_only"

    @property
    def stores(self) -> bool:
        return self.mode != "read_only"


def read_settings(environ: Mapping[str, str], server_url: str) -> Settings:
    """Raises UsageError (code "bad_setting") naming the setting."""
    given = {
        name.removeprefix(PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(PREFIX)
    }
    known = {field.name for field in fields(Settings)}
    for name, text in given.items():
        if name not in known:
            listed = ", ".join(PREFIX + one.upper() for one in sorted(known))
            raise _bad(name, text, f"is unknown; known are {listed}")
    settings = Settings(**{name: _CHECKS[name](name, text) for name, text in given.items()})
    if server_url and settings.address and server_url != settings.address:
        raise _bad(
            "address",
            settings.address,
            f"differs from server_url = {server_url!r} of kv_connector_config; give one of them",
        )
    address = server_url or settings.address or kvw.default_address()
    if not address.startswith("unix://"):
        raise _bad(
            "address",
            address,
            "is not the socket of this host's daemon, whose memory all ranks share; use unix:///path",
        )
    return replace(settings, address=address)


def _text(name: str, text: str) -> str:
    return text


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def check(name: str, text: str) -> str:
        if text not in allowed:
            raise _bad(name, text, f"is not one of {', '.join(allowed)}")
        return text

    return check


def _size(name: str, text: str) -> int:
    size = kvw.parse_size(text, name=PREFIX + name.upper())
    if not 1 << 20 <= size <= 1 << 40:
        raise _bad(name, text, "is out of range; use 1MiB to 1TiB")
    return size


def _seconds(least: float, most: float) -> Callable[[str, str], float]:
    def check(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise _bad(name, text, "is not a number of seconds") from None
        if not least <= value <= most:
            raise _bad(name, text, f"is out of range; use {least:g} to {most:g}")
        return value

    return check


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise _bad(name, text, "is not true or false")
    return text.lower() in ("true", "1")


_CHECKS: dict[str, Callable[[str, str], Any]] = {
    "address": _text,
    "mode": _one_of(*MODES),
    "verify": _one_of("always", "boundary"),
    "weights": _text,
    "salt": _text,
    "staging_bytes": _size,
    "load": _one_of("async", "sync"),
    "lookup_budget_s": _seconds(0, 10),
    "load_timeout_s": _seconds(0.001, 600),
    "store_timeout_s": _seconds(0.001, 600),
    "hold_s": _seconds(0, 60),
    "store_generated": _truth,
}


def _bad(name: str, value: str, problem: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"{PREFIX}{name.upper()} = {value!r} {problem}",
        code="bad_setting",
        context={"setting": name, "value": value},
    )

"""What server_url and the environment may say: read once, checked, frozen.

TensorRT-LLM has no place for a connector's own settings, and passes on only environment variables
that begin with TLLM. Unknown names that begin with TLLM_KVW_ refuse the start: a misspelt setting
is not a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.settings import (
    COMMON_CHECKS,
    Check,
    CommonSettings,
    memory_size,
    number,
    one_of,
    text,
)

PREFIX = "TLLM_KVW_"


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Each is TLLM_KVW_NAME in the environment, in capitals."""

    address: str = ""
    """The daemon of this host, unix:///path. Default: server_url of kv_connector_config, else
    $KVW_ADDRESS, else this user's own socket."""
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
    """How long a promised load is tried again without a page before it fails the engine."""
    store_timeout_s: float = 5.0
    """Bound of one step's store, behind the engine."""
    hold_s: float = 1.0
    """How long blocks of a finished request are held that could not be copied in time; 0: never."""
    store_generated: bool = True
    """Whether blocks of generated tokens are stored too, for the next turn."""


def read_settings(environ: Mapping[str, str], server_url: str) -> Settings:
    """Raises UsageError (code "bad_setting") naming the setting."""
    values = {}
    for full_name, value in environ.items():
        if not full_name.startswith(PREFIX):
            continue
        name = full_name.removeprefix(PREFIX).lower()
        if name not in _CHECKS:
            known = ", ".join(PREFIX + one.upper() for one in sorted(_CHECKS))
            raise _bad(name, value, f"is unknown; known are {known}")
        try:
            values[name] = _CHECKS[name](value)
        except ValueError as error:
            raise _bad(name, value, str(error)) from error
    settings = Settings(**values)
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


def _seconds(least: float, most: float) -> Check:
    check = number(least, most)

    def of_text(text: str) -> Any:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("is not a number of seconds") from None
        return check(value)

    return of_text


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError("is not true or false")
    return text.lower() in ("true", "1")


_CHECKS: dict[str, Check] = {
    **COMMON_CHECKS,
    "weights": text,
    "staging_bytes": memory_size(PREFIX + "STAGING_BYTES"),
    "load": one_of("async", "sync"),
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

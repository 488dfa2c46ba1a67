"""What `kv_connector_extra_config` may say: read once, checked, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.device_copies import WISHES
from kvwarehouse_connectors.core.settings import (
    COMMON_CHECKS,
    PREFIX,
    Check,
    CommonSettings,
    bad_setting,
    memory_size,
    number,
    one_of,
    read_values,
    text,
    truth,
)

WHERE = "kv_connector_extra_config"
ROLES = ("kv_both", "kv_producer", "kv_consumer")


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Each is `kvwarehouse.NAME` in kv_connector_extra_config."""

    weights: str = ""
    """A fingerprint of the weights, where they are not files that can be read (or are dummies)."""
    salt: str = ""
    """Separates those who must not share KV, such as tenants with engines of their own."""
    staging_bytes: int = 0
    """Memory of each worker for pages on their way out: the host's, or the GPU's where they go
    straight. Full: the newest are not stored. 0: what the largest step needs, within bounds
    (staging.py)."""
    device_copies: str = "auto"
    """auto: pages of a GPU go straight between its memory and the warehouse's, where that is
    possible; off: always through a buffer in host memory."""
    load: str = "worth"
    """worth: what is loaded faster than computed; always: whatever is stored."""
    load_timeout_s: float = 5.0
    """Bound of one request's load, whatever the schedule."""
    store_timeout_s: float = 5.0
    """Bound of one step's store, behind the engine."""
    handoff_wait_s: float = 2.0
    """How long a request waits at most for pages that another engine said it stores, from when it
    said so; 0: not at all. A producer gives at most `store_timeout_s` to a step's pages; most take
    milliseconds."""
    keep_limit_s: float = 3600.0
    """The longest that a request may have its pages stay after its end; 0: not at all."""
    prefill_tokens_per_s: float = 0.0
    """This engine's prefill rate until it has measured it; 0: a guess from the device."""
    store_generated: bool = True
    """Whether blocks of generated tokens are stored too, for the next turn."""


def read_settings(extra: Mapping[str, Any], role: str) -> Settings:
    """role: vLLM's kv_role; vLLM does not enforce it, this does. A producer loads nothing, a
    consumer stores nothing. Raises UsageError (code "bad_setting") naming the setting."""
    settings = Settings(**read_values(extra, _CHECKS, WHERE))
    address = settings.address or kvw.default_address()
    return replace(settings, address=address, mode=_mode(settings.mode, role))


def _mode(mode: str, role: str) -> str:
    if role == "kv_producer" and mode == "read_only":
        raise bad_setting(WHERE, "mode", mode, "does not go with kv_role kv_producer, which stores")
    if role == "kv_consumer" and mode == "write_only":
        raise bad_setting(WHERE, "mode", mode, "does not go with kv_role kv_consumer, which loads")
    return {"kv_producer": "write_only", "kv_consumer": "read_only"}.get(role, mode)


_size = memory_size(PREFIX + "staging_bytes")


def _staging(value: Any) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else int(_size(value))


_CHECKS: dict[str, Check] = {
    **COMMON_CHECKS,
    "weights": text,
    "staging_bytes": _staging,
    "device_copies": one_of(*WISHES),
    "load": one_of("worth", "always"),
    "load_timeout_s": number(0.001, 600),
    "store_timeout_s": number(0.001, 600),
    "handoff_wait_s": number(0, 60),
    "keep_limit_s": number(0, 366 * 86_400),
    "prefill_tokens_per_s": number(0, 1e9),
    "store_generated": truth,
}

"""What `--hicache-storage-backend-extra-config` may say: read once, checked, frozen.

Unknown names that begin with "kvwarehouse." refuse the start; the others are SGLang's.
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
    number,
    read_values,
    text,
)

WHERE = "hicache-storage-backend-extra-config"


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Each is `kvwarehouse.NAME` in the extra config."""

    weights: str = ""
    """A name of the weights in place of their fingerprint; it must change whenever they do."""
    salt: str = ""
    """Separates those who must not share KV, such as tenants with engines of their own."""
    load_timeout_s: float = 5.0
    """Bound of one call that loads: SGLang asks for at most 128 pages at a time."""
    store_timeout_s: float = 5.0
    """Bound of one call that stores."""


_CHECKS: dict[str, Check] = {
    **COMMON_CHECKS,
    "weights": text,
    "load_timeout_s": number(0.001, 600),
    "store_timeout_s": number(0.001, 600),
}


def read_settings(extra: Mapping[str, Any] | None) -> Settings:
    """Raises UsageError (code "bad_setting") naming the setting."""
    settings = Settings(**read_values(extra or {}, _CHECKS, WHERE))
    return replace(settings, address=settings.address or kvw.default_address())

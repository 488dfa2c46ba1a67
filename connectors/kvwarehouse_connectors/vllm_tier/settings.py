"""What the tier's entry in `secondary_tiers` may say: read once, checked, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.settings import (
    COMMON_CHECKS,
    PREFIX,
    Check,
    CommonSettings,
    number,
    read_values,
    text,
)

WHERE = "the tier's entry in secondary_tiers"
_OF_VLLM = ("locality",)


@dataclass(frozen=True)
class TierSettings(CommonSettings):
    """Each is `kvwarehouse.NAME` in the tier's entry in secondary_tiers."""

    weights: str = ""
    """A fingerprint of all weights, the draft model's too, where they are not files that can be
    read (or are dummies)."""
    salt: str = ""
    """Separates those who must not share KV, such as tenants with engines of their own."""
    load_timeout_s: float = 5.0
    """Bound of one load, from when vLLM asks for it, and of the wait for chunks on NVMe."""
    store_timeout_s: float = 5.0
    """Bound of one store, from when vLLM asks for it."""


def read_settings(extra: Mapping[str, Any]) -> TierSettings:
    """extra: the entry, without what vLLM takes out of it. Raises UsageError (code "bad_setting")
    naming the setting, also for one without prefix that vLLM gives to no tier: nobody would read
    it."""
    for name in extra:
        if not name.startswith(PREFIX) and name not in _OF_VLLM:
            raise kvw.UsageError(
                f"{WHERE}: {name} is unknown; settings of this tier begin with {PREFIX}",
                code="bad_setting",
                context={"setting": name, "value": extra[name]},
            )
    settings = TierSettings(**read_values(extra, _CHECKS, WHERE))
    return replace(settings, address=settings.address or kvw.default_address())


_CHECKS: dict[str, Check] = {
    **COMMON_CHECKS,
    "weights": text,
    "load_timeout_s": number(0.001, 600),
    "store_timeout_s": number(0.001, 600),
}

"""What `adapter_params` of the plugin may say: read once, checked, frozen.

The parameters are this connector's alone, so any unknown name refuses the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.settings import (
    COMMON_CHECKS,
    PREFIX,
    Check,
    CommonSettings,
    memory_size,
    number,
    read_values,
    truth,
)

WHERE = "adapter_params of --l2-adapter"


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Each is `kvwarehouse.NAME` in adapter_params."""

    verify: str = "always"
    """always: every chunk's digest; boundary: only of chunks from NVMe or of an earlier daemon."""
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    """Model, as the engine names it, to the path (or the name on the hub) of its weights, which are
    fingerprinted."""
    weights: str | Mapping[str, str] = ""
    """A name of the weights in place of their fingerprint, for all models or by model; it must
    change whenever they do."""
    trust_model_names: bool = False
    """Tells the weights of models that are not named above by LMCache's name of them alone."""
    salt: str = ""
    """Separates those who must not share KV, such as servers for engines of other settings."""
    load_timeout_s: float = 5.0
    """Bound of one load, from when LMCache asks for it."""
    store_timeout_s: float = 5.0
    """Bound of one store, likewise: so long LMCache cannot evict what it is made of."""
    lock_timeout_s: float = 300.0
    """After so long a lock ends that LMCache took and never gave back."""
    store_queue_bytes: int = 1 << 30
    """Chunks that wait to be stored. Full: the newest are not stored."""


def read_settings(params: Mapping[str, Any] | None) -> Settings:
    """Raises UsageError (code "bad_setting") naming the setting."""
    for name in params or {}:
        if not name.startswith(PREFIX):
            raise kvw.UsageError(
                f"{WHERE}: {name!r} is unknown; its settings begin with {PREFIX!r}",
                code="bad_setting",
                context={"setting": name},
            )
    settings = Settings(**read_values(params or {}, _CHECKS, WHERE))
    return replace(settings, address=settings.address or kvw.default_address())


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("is not an object of model to text")
    for model, one in value.items():
        if not isinstance(model, str) or not isinstance(one, str) or not model or not one:
            raise ValueError(f"has {model!r}: {one!r}; give both of them text")
    return dict(value)


def _name_or_names(value: Any) -> str | dict[str, str]:
    return value if isinstance(value, str) else _texts(value)


_CHECKS: dict[str, Check] = {
    **COMMON_CHECKS,
    "checkpoints": _texts,
    "weights": _name_or_names,
    "trust_model_names": truth,
    # LMCache's own locks on the memory that is read and written here last 300 and 600 s.
    "load_timeout_s": number(0.001, 120),
    "store_timeout_s": number(0.001, 120),
    "lock_timeout_s": number(1, 3600),
    "store_queue_bytes": memory_size(PREFIX + "store_queue_bytes"),
}

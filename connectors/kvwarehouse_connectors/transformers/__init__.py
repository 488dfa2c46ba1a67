"""Reuse of KV for causal LMs of the transformers library.

    from kvwarehouse_connectors.transformers import WarehousePrefill

    with WarehousePrefill(model, client, weights=kvw.fingerprint(path)) as warehouse:
        result = warehouse.prefill(input_ids)   # loads the longest stored prefix, computes the rest
        ids = torch.cat([input_ids, result.next_token], dim=1)
        model.generate(ids, past_key_values=result.cache)

`kvwarehouse demo` shows what it saves. Needs torch and transformers, which are imported when a name
is first used: the help of the demo does not wait for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvwarehouse_connectors.transformers.prefill import (
        LoadedPrefix,
        PrefillOptions,
        WarehousePrefill,
    )
    from kvwarehouse_connectors.transformers.result import (
        PrefillResult,
        PrefillStats,
        Reuse,
        StoreState,
    )
    from kvwarehouse_connectors.transformers.room import RoomyCache

__all__ = [
    "LoadedPrefix",
    "PrefillOptions",
    "PrefillResult",
    "PrefillStats",
    "Reuse",
    "RoomyCache",
    "StoreState",
    "WarehousePrefill",
]

_HOMES = {
    "LoadedPrefix": "prefill",
    "PrefillOptions": "prefill",
    "PrefillResult": "result",
    "PrefillStats": "result",
    "Reuse": "result",
    "RoomyCache": "room",
    "StoreState": "result",
    "WarehousePrefill": "prefill",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

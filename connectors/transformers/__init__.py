"""Reuse of KV for causal LMs of the transformers library.

    from kvwarehouse_connectors.transformers import WarehousePrefill

    with WarehousePrefill(model, client, weights=kvw.fingerprint(path)) as warehouse:
        result = warehouse.prefill(input_ids)   # loads the longest stored prefix, computes the rest
        ids = torch.cat([input_ids, result.next_token], dim=1)
        model.generate(ids, past_key_values=result.cache)

`kvwarehouse demo` shows what it saves. Needs torch and transformers.
"""

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

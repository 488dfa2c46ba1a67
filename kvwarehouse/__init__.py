"""A warehouse for the KV cache of LLM inference.

    import kvwarehouse as kvw

    space = kvw.Namespace(model="name", weights=kvw.fingerprint(path), dtype="bfloat16",
                          layout="writer/version", page_tokens=64, page_bytes=8_388_608)
    with kvw.connect("unix:///run/user/1000/kvwarehouse/default.sock") as client:
        ns = client.open(space)
        ns.store(tokens, pages)      # pages: uint8 (n, page_bytes), n = len(tokens) // page_tokens
        match = ns.lookup(tokens)    # match.pages, match.tokens, match.by_tier
        filled = ns.load(tokens, out)  # the longest stored prefix, or less; never wrong bytes

`kvw.aio.connect` makes the same client for asyncio. `kvw.embedded(dram="1GiB")` starts a private
daemon for scripts and tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvwarehouse.embedded import PrivateDaemon, embedded
from kvwarehouse.errors import (
    CapacityError,
    InternalError,
    PinError,
    StorageError,
    TransportError,
    UsageError,
    WarehouseError,
)
from kvwarehouse.fingerprint import fingerprint
from kvwarehouse.places import default_address
from kvwarehouse.sizes import format_size, parse_size
from kvwarehouse.types import (
    BadCopy,
    CheckProgress,
    ClearedPages,
    Control,
    FlushResult,
    KeyRun,
    Loaded,
    Match,
    MissingPages,
    Namespace,
    RequestNote,
    StoreResult,
    Tier,
    TierCheck,
)

if TYPE_CHECKING:
    from kvwarehouse import aio, gpu, host
    from kvwarehouse.client.client import Client
    from kvwarehouse.client.connect import connect
    from kvwarehouse.client.namespace import OpenNamespace
    from kvwarehouse.client.pins import Pins
    from kvwarehouse.client.regions import Regions

__all__ = [
    "BadCopy",
    "CapacityError",
    "CheckProgress",
    "ClearedPages",
    "Client",
    "Control",
    "FlushResult",
    "InternalError",
    "KeyRun",
    "Loaded",
    "Match",
    "MissingPages",
    "Namespace",
    "OpenNamespace",
    "PinError",
    "Pins",
    "PrivateDaemon",
    "Regions",
    "RequestNote",
    "StorageError",
    "StoreResult",
    "Tier",
    "TierCheck",
    "TransportError",
    "UsageError",
    "WarehouseError",
    "aio",
    "connect",
    "default_address",
    "embedded",
    "fingerprint",
    "format_size",
    "gpu",
    "host",
    "parse_size",
]

# gRPC, asyncio and numpy take most of a second to import, and a command may need none of them.
_IMPORTED_WHEN_USED = {
    "aio": "kvwarehouse.aio",
    "gpu": "kvwarehouse.gpu",
    "host": "kvwarehouse.host",
    **dict.fromkeys(
        ("Client", "OpenNamespace", "Pins", "Regions", "connect"), "kvwarehouse.client"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_IMPORTED_WHEN_USED[name])
    value = module if module.__name__.endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

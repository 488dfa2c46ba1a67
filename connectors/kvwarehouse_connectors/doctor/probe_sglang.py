"""The steps of probe.py for SGLang."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module, metadata
from typing import Any

MODULE = "kvwarehouse_connectors.sglang"
CLASS = "WarehouseStorage"
_FACTORY = "sglang.srt.mem_cache.storage.backend_factory"


def _engine() -> dict[str, Any]:
    version = metadata.version("sglang")
    import_module("sglang.srt.mem_cache.hicache_storage")
    return {"version": version}


def _device() -> dict[str, Any]:
    get_device = import_module("sglang.srt.utils").get_device
    try:
        found = {"device": str(get_device()).partition(":")[0]}
    except RuntimeError:  # what it raises where there is no accelerator (0.5.23)
        return {"device": "cpu"}
    with suppress(Exception):  # not every device has a name; it is only shown
        module = import_module("torch").get_device_module(found["device"])
        found["device_name"] = str(module.get_device_name())
    return found


def _plugin() -> dict[str, Any]:
    """As a backend that is called `dynamic` is looked for, by module and class."""
    factory = import_module(_FACTORY).StorageBackendFactory
    return {"registered": bool(factory._load_backend_class(MODULE, CLASS, "kvwarehouse"))}


def _connector() -> dict[str, Any]:
    backend = getattr(import_module(MODULE), CLASS)
    missing = sorted(getattr(backend, "__abstractmethods__", ()))
    told = f"SGLang asks for methods it does not have: {', '.join(missing)}" if missing else ""
    return {"connector_error": told}


STEPS = (_engine, _device, _plugin, _connector)

"""Imports vLLM as vLLM's own processes do, and tells what it found: a line of JSON for each step.

Runs as a process of its own (`python -m kvwarehouse_connectors.doctor.probe`): an import may hang,
write to stdout, or take the process with it, and none of that may become the doctor's. What the
steps need is looked up by name, so that another version of vLLM costs a step and not the probe.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

CONNECTOR = "WarehouseConnector"
_MOST_TEXT = 400

Found = dict[str, Any]


def main() -> None:
    # Imports may print: what they print is not ours, and goes where errors go.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for step in (_torch, _engine, _device, _plugin, _connector, _hashes):
        print(json.dumps({"step": step.__name__.strip("_")}), file=answer, flush=True)
        print(json.dumps(_found(step)), file=answer, flush=True)


def _found(step: Callable[[], Found]) -> Found:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
        text = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
        return {_ERRORS[step.__name__]: text} if step.__name__ in _ERRORS else {}


_ERRORS = {"_torch": "torch_error", "_engine": "engine_error", "_connector": "connector_error"}


def _torch() -> Found:
    return {"torch": str(import_module("torch").__version__)}


def _engine() -> Found:
    version = str(import_module("vllm").__version__)
    import_module("vllm.config")
    return {"version": version}


def _device() -> Found:
    platform = import_module("vllm.platforms").current_platform
    found = {"device": str(platform.device_type)}
    with suppress(Exception):  # not every platform has one; it is only shown
        found["device_name"] = str(platform.get_device_name())
    return found


def _plugin() -> Found:
    import_module("vllm.plugins").load_general_plugins()
    return {"registered": CONNECTOR in _factory()._registry}


def _connector() -> Found:
    connector = import_module("kvwarehouse_connectors.vllm.connector").WarehouseConnector
    missing = sorted(getattr(connector, "__abstractmethods__", ()))
    if missing:
        return {"connector_error": f"vLLM asks for hooks it does not have: {', '.join(missing)}"}
    return {"connector_error": ""}


def _hashes() -> Found:
    config = import_module("vllm.config").CacheConfig
    return {"hash_algorithm": str(config().prefix_caching_hash_algo)}


def _factory() -> Any:
    return import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory


if __name__ == "__main__":
    main()

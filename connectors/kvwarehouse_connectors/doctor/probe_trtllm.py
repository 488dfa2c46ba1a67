"""The steps of probe.py for TensorRT-LLM."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

MODULE = "kvwarehouse_connectors.trtllm"
SCHEDULER, WORKER = "WarehouseScheduler", "WarehouseWorker"


def _engine() -> dict[str, Any]:
    return {"version": str(import_module("tensorrt_llm").__version__)}


def _device() -> dict[str, Any]:
    cuda = import_module("torch").cuda
    if not cuda.is_available():
        return {"device": "cpu"}
    found = {"device": "cuda"}
    with suppress(Exception):  # it is only shown
        found["device_name"] = str(cuda.get_device_name())
    return found


def _connector() -> dict[str, Any]:
    """It compares its methods with those that this revision asks for when it is imported."""
    module = import_module(MODULE)
    return {"registered": all(getattr(module, name) for name in (SCHEDULER, WORKER))}


STEPS = (_engine, _device, _connector)

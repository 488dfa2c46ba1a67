"""Everything of TensorRT-LLM that differs, or may come to differ, between its revisions. Nothing
else here knows a version; nothing else imports from it but the base classes, re-exported here.

Written from its public sources: kv_cache_connector.py at 00fdcbff5ad8 (the old path) and
035ab91cad04 (the new one), kv_cache_layout.py at 0972960b5237, nanobind/batch_manager/bindings.cpp
at 0159d90588fd, llm_args.py. Imported in TensorRT-LLM's processes only. Stateless.
"""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from typing import Any

import kvwarehouse as kvw

_PACKAGE = "tensorrt_llm._torch.pyexecutor"
_PATHS = (f"{_PACKAGE}.connectors.kv_cache_connector", f"{_PACKAGE}.kv_cache_connector")


def _interface() -> Any:
    for path in _PATHS:
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise  # the module is there, and something that it needs is not
    raise ImportError(
        f"TensorRT-LLM's connector interface is at neither of {', '.join(_PATHS)}; kvwarehouse"
        " serves revisions that have one of them (1.0 to 1.4)"
    )


_interface_module = _interface()
KvCacheConnectorScheduler = _interface_module.KvCacheConnectorScheduler
KvCacheConnectorWorker = _interface_module.KvCacheConnectorWorker
VERSION = str(getattr(import_module("tensorrt_llm"), "__version__", "unknown"))
NAMES_SALTS = "cache_salt" in {
    field.name for field in dataclasses.fields(_interface_module.RequestData)
}
"""Whether this revision tells connectors a request's cache_salt; older ones have none."""


def check_interface(shell: type) -> None:
    """Raises UsageError (code "unsupported") where this revision asks of connectors what `shell`
    does not do, or calls it otherwise."""
    missing = sorted(getattr(shell, "__abstractmethods__", ()))
    if missing:
        raise _strange(f"asks connectors for {', '.join(missing)}")
    for name, method in inspect.getmembers(shell, inspect.isfunction):
        base = next((b.__dict__[name] for b in shell.__mro__[1:] if name in b.__dict__), None)
        if name.startswith("_") or not inspect.isfunction(base):
            continue
        asked, given = _positional(base), _positional(method)
        if asked is not None and given is not None and asked != given:
            raise _strange(f"calls {name} with {asked - 1} arguments, not {given - 1}")


def _strange(problem: str) -> kvw.UsageError:
    return unsupported(
        f"TensorRT-LLM {VERSION}", f"{problem}, which this version of kvwarehouse does not know"
    )


def _positional(method: Any) -> int | None:
    """Positional parameters; None where any number goes."""
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return len([p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)])


def rank() -> int:
    return int(import_module("tensorrt_llm._utils").mpi_rank())


def device_name(tensor: Any) -> str:
    """The kind of device that a cache is on: bytes depend on its kernels."""
    kind = str(tensor.device.type)
    if kind != "cuda":
        return kind
    torch = import_module("torch")
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"{kind}/{major}.{minor}"


# -- a request -------------------------------------------------------------------------------------

# Each changes KV beside the token ids; None where a request has none. The C++ base class binds all
# but the last, in which the Python class carries media: those too that have no hashes, because
# hashing failed or was given up, and whose placeholder is one token id for every image.
_BESIDE_TOKENS = (
    "lora_task_id",
    "prompt_embedding_table",
    "multimodal_embedding",
    "multimodal_hashes",
    "mrope_rotary_cos_sin",
    "position_ids",
    "encoder_tokens",
    "py_multimodal_data",
)


def request_id(request: Any) -> int:
    return int(request.request_id)


def request_tokens(request: Any) -> list[int]:
    return list(request.get_tokens(0))


def prompt_tokens(request: Any) -> int:
    return int(request.prompt_len)


def request_salt(request: Any) -> bytes | None:
    """Of its cache_salt; b"" for a request without one, None where that cannot be told. The C++
    class binds only the id that TensorRT-LLM makes of the salt's digest."""
    asked = False
    for name in ("cache_salt", "cache_salt_id"):
        if hasattr(request, name):
            asked = True
            value = getattr(request, name)
            if value is not None:
                return f"{name}={value}".encode()
    return b"" if asked or not NAMES_SALTS else None


def request_problem(request: Any) -> str:
    """Why a request is neither loaded nor stored; "" where it may be."""
    if getattr(request, "is_dummy_request", False):
        return "is a dummy"
    for name in _BESIDE_TOKENS:
        if getattr(request, name, None) is not None:
            return f"has {name}, which its tokens do not name"
    return ""


def honoured_tokens(request: Any) -> int | None:
    """How much of the last offer the engine takes; None where this revision does not say."""
    value = getattr(request, "py_num_connector_matched_tokens", None)
    return None if value is None else int(value)


def unsupported(what: str, problem: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"kvwarehouse cannot serve {what}: it {problem}. Start it without kv_connector_config, or"
        " see docs/trtllm.md for what is served",
        code="unsupported",
    )

"""A vLLM engine in processes of its own, as a bench drives it: its environment, the same for every
engine of a run, its options, as vLLM's LLM and `vllm serve` take them, and what it is asked. One
owner; not thread-safe.

    with Engine(options, environment, folder) as engine:
        answer = engine.ask([Ask(tokens)])

Every exchange has a deadline.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from kvwarehouse_bench.harness.process import Exchange, ProgramError, wait_for
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS
from kvwarehouse_bench.vllm.messages import Ask, EngineReply

_BENCH = Path(__file__).resolve().parents[2]

ALONE = {"kvwarehouse.load": False, "kvwarehouse.store": False}
"""kv_transfer_params of a request that has nothing to do with the warehouse."""
PEER_ALONE = {"max_load_tokens": 0, "max_offload_tokens": 0}
"""The same for vLLM's own offloading."""

START_S = 300.0
EXCHANGE_S = 900.0
SETTLE_S = 1.2
"""After this an idle engine sleeps: its worker looks for work without sleeping for a second."""
_FORGET_S = 30.0


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def engine_environment(
    folder: Path, cache_gib: int, cores: Sequence[int] | None = None
) -> dict[str, str]:
    """cores: that the engine computes on; None: all. Its threads are bound to them: left to itself
    vLLM keeps one for its front end in some runs and none in others, and figures differ twofold."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVW_", "VLLM_"))}
    bound = ",".join(map(str, cores or usable_cores()))
    path = os.pathsep.join([str(_BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",  # a source tree in the working directory hides no package
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    }


def engine_options(
    checkpoint: Path, longest_tokens: int, step_tokens: int, transfer: dict[str, Any]
) -> dict[str, Any]:
    """step_tokens: prefill of a step; a longer prompt takes several."""
    return {
        "model": str(checkpoint),
        "max_model_len": longest_tokens,
        "max_num_batched_tokens": step_tokens,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "disable_log_stats": False,
        "kv_transfer_config": transfer,
    }


def warehouse_transfer(address: str, role: str = "kv_both", **settings: Any) -> dict[str, Any]:
    """settings: the connector's, without their prefix."""
    return {
        "kv_connector": "WarehouseConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kvwarehouse.address": address,
            **{f"kvwarehouse.{name}": value for name, value in settings.items()},
        },
    }


def toggled_transfer(address: str) -> dict[str, Any]:
    """The connector with a switch (toggled.py)."""
    return {
        **warehouse_transfer(address),
        "kv_connector": "Toggled",
        "kv_connector_module_path": "kvwarehouse_bench.vllm.toggled",
    }


def peer_transfer(engine_id: str, cpu_bytes: int, files: Path) -> dict[str, Any]:
    """vLLM's own offloading to memory and to files, with a worker for the CPU (peer.py)."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "kvwarehouse_bench.vllm.peer",
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(files)}],
        },
    }


class VllmEngine(Protocol):
    """What a bench needs of one, whichever way it is started."""

    def ask(self, asks: Sequence[Ask]) -> EngineReply:
        """All at once."""
        ...

    def forget(self, *, connector: bool = False) -> None:
        """Empties vLLM's own prefix cache; `connector`: and what the connector has in memory."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Offline:
    """options: those of vLLM's LLM."""

    def __init__(
        self, options: Mapping[str, Any], environment: Mapping[str, str], folder: Path
    ) -> None:
        def command(descriptor: int) -> list[str]:
            what = [str(descriptor), json.dumps(options)]
            return [sys.executable, "-P", "-m", "kvwarehouse_bench.vllm.host", *what]

        self._exchange = Exchange(command, environment, folder, "the engine")

    def __enter__(self) -> Self:
        self._exchange.start(START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exchange.__exit__(kind, error, trace)

    def ask(self, asks: Sequence[Ask]) -> EngineReply:
        return EngineReply(**self._call("generate", asks=[asdict(ask) for ask in asks]))

    def forget(self, *, connector: bool = False) -> None:
        if not wait_for(lambda: bool(self._call("forget", connector=connector)), _FORGET_S):
            raise ProgramError(f"blocks are in use still after {_FORGET_S:.0f} s")

    def _call(self, do: str, **arguments: Any) -> Any:
        return self._exchange.call(do, EXCHANGE_S, **arguments)

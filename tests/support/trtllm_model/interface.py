"""The base classes, as a connector sees them, put where TensorRT-LLM would have them.

`install("new")` or `install("old")`: the two module paths, each with what its revision has.
"""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, make_dataclass
from typing import Any

PATHS = {
    "new": "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "old": "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
}
VERSIONS = {"new": "1.3.0-model", "old": "1.1.0-model"}

# The process's own rank, as mpi_rank() tells it.
RANK = [0]


@dataclass
class RequestData:  # [M-new]
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


OldRequestData = make_dataclass(  # [M-old]: nothing behind the first five
    "RequestData",
    ["request_id", "new_tokens", "new_block_ids", "computed_position", "num_scheduled_tokens"],
)


@dataclass
class SchedulerOutput:
    new_requests: list[Any] = field(default_factory=list)
    cached_requests: list[Any] = field(default_factory=list)
    attention_dp_rank: int | None = None


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def register_forward_pass_callable(self) -> Any:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


def install(revision: str = "new") -> None:
    """Afterwards kvwarehouse_connectors.trtllm can be imported."""
    for name in list(sys.modules):
        if name == "tensorrt_llm" or name.startswith("tensorrt_llm."):
            del sys.modules[name]
    parts = PATHS[revision].split(".")
    for end in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:end]))
        module.__path__ = []  # type: ignore[attr-defined]  # what makes it a package
        sys.modules[module.__name__] = module
    sys.modules["tensorrt_llm"].__version__ = VERSIONS[revision]  # type: ignore[attr-defined]
    utils = types.ModuleType("tensorrt_llm._utils")
    utils.mpi_rank = lambda: RANK[0]  # type: ignore[attr-defined]
    sys.modules[utils.__name__] = utils
    vars(sys.modules[PATHS[revision]]).update(
        KvCacheConnectorScheduler=KvCacheConnectorScheduler,
        KvCacheConnectorWorker=KvCacheConnectorWorker,
        SchedulerOutput=SchedulerOutput,
        RequestData=RequestData if revision == "new" else OldRequestData,
    )


def stands_for_it() -> bool:
    """Whether what imports as tensorrt_llm here is this model."""
    return getattr(sys.modules.get("tensorrt_llm"), "__version__", "") in VERSIONS.values()

"""Requests as vLLM's scheduler has them, with its own block hashes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

VOCABULARY = 50_000


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def request(
    ids: list[int],
    *,
    hash_tokens: int = 16,
    algorithm: str = "sha256",
    name: str = "r",
    params: dict[str, Any] | None = None,
    **options: Any,
) -> Request:
    """params: kv_transfer_params. options: of vllm's Request, such as cache_salt."""
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    extra = {"kv_transfer_params": params} if params is not None else None
    return Request(
        name,
        list(ids),
        SamplingParams(max_tokens=1000, extra_args=extra),
        None,
        block_hasher=get_request_block_hasher(hash_tokens, function),
        **options,
    )


def write_adapter(folder: Path, value: float, name: str = "adapter_model.safetensors") -> Path:
    """An adapter whose weights are `value`, of the same size whatever it is; what was there before
    is replaced, as trainers do."""
    folder.mkdir(exist_ok=True)
    fresh = folder / "fresh"
    save_file({"a": np.full((8, 8), value, np.float32)}, fresh)
    fresh.replace(folder / name)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return folder


def adapter(path: str, *, name: str = "a", number: int = 1, inplace: bool = False) -> LoRARequest:
    return LoRARequest(name, number, path, load_inplace=inplace)

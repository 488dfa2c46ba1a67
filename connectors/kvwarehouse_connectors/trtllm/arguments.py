"""The engine's arguments (TensorRT-LLM's llm_args), as far as the connector reads them, and which
of them it cannot serve.

Knows no TensorRT-LLM: names and defaults as of its llm_args.py. Stateless.
"""

from __future__ import annotations

from typing import Any


def tensor_parallel(llm_args: Any) -> int:
    return int(getattr(llm_args, "tensor_parallel_size", 1) or 1)


def tokens_per_block(llm_args: Any) -> int:
    return int(getattr(llm_args.kv_cache_config, "tokens_per_block", 32) or 32)


def engine_problem(llm_args: Any) -> str:
    """Why an engine of these arguments cannot be served, as what "it" does; "" where it can."""
    for name, what in (
        ("pipeline_parallel_size", "splits its layers over pipeline stages"),
        ("context_parallel_size", "splits the context over ranks"),
        ("max_beam_width", "searches with several beams"),
    ):
        value = int(getattr(llm_args, name, 1) or 1)
        if value > 1:
            return f"{what} ({name} = {value}; served: 1)"
    if getattr(llm_args, "enable_attention_dp", False):
        return "gives each rank requests of its own (enable_attention_dp; served: false)"
    if getattr(llm_args, "speculative_config", None) is not None:
        return (
            "drafts tokens (speculative_config): a draft's KV depends on tokens that are not in a"
            " block's key"
        )
    if getattr(llm_args, "sparse_attention_config", None) is not None:
        return "keeps its KV for sparse attention (sparse_attention_config)"
    if getattr(llm_args, "ray_worker_extension_cls", None):
        return (
            "takes other weights while it runs (ray_worker_extension_cls ="
            f" {llm_args.ray_worker_extension_cls}), of which it tells a connector nothing: their"
            " KV would be stored where the first weights' is found"
        )
    for name in ("sleep_config", "enable_sleep"):
        if getattr(llm_args, name, None):
            return (
                f"gives up the memory of weights and blocks while it sleeps ({name}), and tells a"
                " connector neither that nor which weights come back"
            )
    ranks, host = tensor_parallel(llm_args), int(getattr(llm_args, "gpus_per_node", 0) or 0)
    if host and ranks > host:
        return (
            f"has {ranks} ranks on hosts of {host} (tensor_parallel_size, gpus_per_node): all ranks"
            " share the memory of one host's daemon"
        )
    if ranks > 64:
        return f"has {ranks} ranks (tensor_parallel_size; served: at most 64)"
    return ""


def pool_problem(llm_args: Any) -> str:
    """As engine_problem, of an engine with one pool tensor (KVCacheManager, V1): its block tables
    do not say which blocks a window has passed."""
    windows = getattr(llm_args.kv_cache_config, "max_attention_window", None)
    reach = getattr(llm_args, "max_seq_len", None)
    if windows and (reach is None or min(windows) < reach):
        return (
            f"has attention windows of {sorted(set(windows))} tokens and max_seq_len {reach} on one"
            " pool tensor (served: none, or at least max_seq_len; or"
            " kv_cache_config.use_kv_cache_manager_v2)"
        )
    return ""


# What of the arguments the bytes of a block depend on, besides the weights and the layout.
_TELLING = ("dtype", "attn_backend", "model_kwargs", "quant_config", "max_seq_len")


def telling_arguments(llm_args: Any) -> dict[str, str]:
    found = {name: str(getattr(llm_args, name, None)) for name in _TELLING}
    found["kv_cache_dtype"] = str(getattr(llm_args.kv_cache_config, "dtype", None))
    return found


def loads_no_weights(llm_args: Any) -> bool:
    return "dummy" in str(getattr(llm_args, "load_format", "")).lower()


def server_url(llm_args: Any) -> str:
    config = getattr(llm_args, "kv_connector_config", None)
    return str(getattr(config, "server_url", None) or "")

"""All options that vLLM has, and of each whether KV depends on it. A version of vLLM with an option
that stands nowhere here fails: somebody has to look what it does, because an option left out could
cost a wrong answer, and one too many costs a miss."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import torch
import vllm.config
import vllm.envs
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

from kvwarehouse_connectors.vllm.identity import READ_THE_FILES
from kvwarehouse_connectors.vllm.kv_options import (
    CHANGE_KV,
    ENVIRONMENT,
    options_digest,
    set_options,
)
from vllm_parts.halves import engine_config
from vllm_rig.checkpoints import Checkpoints

# By vLLM's class, the place in CHANGE_KV.
PLACES = {
    "VllmConfig": "",
    "AttentionConfig": "attention_config",
    "CacheConfig": "cache_config",
    "DiffusionConfig": "diffusion_config",
    "KernelConfig": "kernel_config",
    "LoRAConfig": "lora_config",
    "MambaConfig": "mamba_config",
    "ModelConfig": "model_config",
    "MultiModalConfig": "model_config.multimodal_config",
    "SpeculativeConfig": "speculative_config",
}

NO_KV_AT_ALL = {
    # How a formula is compiled, and which kernels are tried first: rounding.
    "CompilationConfig",
    "DynamicShapesConfig",
    "IrOpPriorityConfig",
    "PassConfig",
    "Range",
    # Where weights, and copies of experts, lie.
    "EPLBConfig",
    "EngramConfig",
    "OffloadConfig",
    "PrefetchOffloadConfig",
    "UVAOffloadConfig",
    # Where copies of KV lie, and who hears of it.
    "HiSparseConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    # An encoder's output goes from engine to engine by vLLM's own names of it.
    "ECTransferConfig",
    "EncoderCacheManagerConfig",
    # What media may be at most, and dummies of them.
    "AudioDummyOptions",
    "BaseDummyOptions",
    "ImageDummyOptions",
    "VideoDummyOptions",
    # What is made of hidden states, logits and text.
    "AuxOutputConfig",
    "PoolerConfig",
    "ReasoningConfig",
    "SpeechToTextConfig",
    "SpeechToTextParams",
    "StructuredOutputsConfig",
    "WatermarkConfig",
    # How the engine is run and looked at.
    "FaultToleranceConfig",
    "LoggingConfig",
    "ObservabilityConfig",
    "ProfilerConfig",
}

ELSEWHERE = {
    "AttentionConfig": {
        "backend": "the workers say it",
        "backend_per_kind": "the workers say it",
        "hisparse_config": "its caches are refused",
        "use_non_causal": "the backend, and the model's config",
    },
    "CacheConfig": {
        "block_size": "page_tokens",
        "cache_dtype": "kv_dtype",
        "hash_block_size": "the keys",
        "kv_cache_layout": "layout",
        "mamba_block_size": "page_tokens",
        "mamba_cache_mode": "others than align are refused",
        "mamba_page_size_padded": "page_bytes",
        "prefix_caching_hash_algo": "hash_scheme",
        "prefix_match_unit": "the keys",
        "skip_page_size_padded": "page_bytes",
        "sliding_window": "the model's config, and the group's rule",
        "use_kda_recoverssm": "the model and its draft",
    },
    "DeviceConfig": {"device": "device", "device_type": "device"},
    "LoadConfig": {
        "download_dir": "the files there are fingerprinted",
        "ignore_patterns": "the files that are there are fingerprinted",
        "load_format": "weights",
        "model_loader_extra_config": "weights, as far as it chooses files",
    },
    "ModelArchitectureConfig": {"*": "made of the model's config"},
    "ModelConfig": {
        "config_format": "the config",
        "disable_sliding_window": "the config, max_model_len and the group's rule",
        "dtype": "dtype",
        "hf_config": "the config",
        "hf_config_path": "the config",
        "hf_overrides": "the config, in which they are",
        "hf_text_config": "the config, of which it is a part",
        "is_submodel_config": "the config",
        "max_model_len": "max_model_len",
        "model": "the model's name and weights",
        "model_weights": "weights",
        "multimodal_config": "its own options",
        "override_generation_config": "overrides",
        "quantization": "quantization",
        "revision": "weights",
        "spec_target_max_model_len": "max_model_len",
        "word_embeddings_untied_by_checkpoint": "weights",
    },
    "ParallelConfig": {
        "cp_kv_cache_interleave_size": "the tier's interleave; the connector refuses its use",
        "dcp_kv_cache_interleave_size": "becomes cp_kv_cache_interleave_size",
        "decode_context_parallel_size": "the tier's rows; the connector refuses it",
        "pipeline_parallel_size": "shards and stages",
        "prefill_context_parallel_size": "the tier's rows; the connector refuses it",
        "tensor_parallel_size": "shards",
        "world_size": "shards",
    },
    "QuantizationConfigArgs": dict.fromkeys(
        ("linear", "moe", "ignore", "targets"), "quantization_config"
    ),
    "QuantSpec": dict.fromkeys(("weight", "activation"), "quantization_config"),
    "SpeculativeConfig": {
        "attention_backend": "the workers say it",
        "draft_load_config": "the draft's weights",
        "draft_model_config": "the draft",
        "draft_parallel_config": "the draft's shards",
        "draft_tensor_parallel_size": "the draft's shards",
        "method": "the draft",
        "model": "the draft's weights",
        "parallel_drafting": "refused",
        "revision": "the draft's weights",
        "target_model_config": "the target",
        "target_parallel_config": "the target",
        "tensor_parallel_size": "vLLM refuses it",
    },
    "VllmConfig": {
        **dict.fromkeys(
            (
                "attention_config",
                "cache_config",
                "device_config",
                "diffusion_config",
                "kernel_config",
                "load_config",
                "lora_config",
                "mamba_config",
                "model_config",
                "parallel_config",
                "scheduler_config",
                "speculative_config",
            ),
            "its own options",
        ),
        "quant_config": "quantization, its config and the checkpoint",
        "weight_transfer_config": "the workers see other weights",
    },
    "WeightTransferConfig": {"*": "the workers see other weights"},
}

NO_KV = {
    "AttentionConfig": (
        "flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_block_m"
        " flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size mla_prefill_backend"
        " minimax_m3_msa_decode_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor"
        " tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention"
    ),
    "CacheConfig": (
        "_block_size_resolved cache_hit_alignment_tokens effective_attention_block_size"
        " enable_mamba_shared_prefix_checkpoint enable_prefix_caching gpu_memory_utilization"
        " is_attention_free kv_cache_max_concurrency kv_cache_memory_bytes kv_cache_size_tokens"
        " kv_offloading_backend kv_offloading_size num_cpu_blocks num_gpu_blocks"
        " num_gpu_blocks_override prefix_cache_retention_interval user_specified_block_size"
    ),
    "DiffusionConfig": "max_denoising_steps",
    "KernelConfig": (
        "enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup"
        " enable_rocm_segmented_attn_autotune ir_op_priority sparse_indexer_topk_backend"
    ),
    "LoRAConfig": (
        "default_mm_loras enable_mixed_moe_lora_format fully_sharded_loras max_cpu_loras"
        " max_lora_cls_labels max_lora_rank max_loras specialize_active_lora"
    ),
    "LoadConfig": (
        "device pt_load_map_location safetensors_load_strategy"
        " safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load"
    ),
    "MambaConfig": "backend ssu_algorithm",
    "ModelConfig": (
        "allow_deprecated_quantization allowed_local_media_path allowed_media_domains convert"
        " disable_cascade_attn enable_cumem_allocator enable_nccl_comm_suspend"
        " enable_prompt_embeds enable_sleep_mode enable_trace_replay enforce_eager"
        " generation_config hf_token io_processor_plugin logits_processors logprobs_mode"
        " max_logprobs pooler_config renderer_num_workers return_sampling_mask runner seed"
        " served_model_name skip_tokenizer_init sleep_mode_backend"
        " sleep_mode_offload_cudagraph sleep_preserve_parameter_names tokenizer tokenizer_mode"
        " tokenizer_revision use_fp64_gumbel"
    ),
    "MultiModalConfig": (
        "allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings limit_per_prompt"
        " mm_device_do_normalize mm_encoder_attn_backend mm_encoder_fp8_scale_save_margin"
        " mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm"
        " mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type"
        " mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling"
    ),
    "ParallelConfig": (
        "_allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank"
        " _coord_store_port _data_parallel_master_port_list all2all_backend"
        " assigned_physical_gpu_ids cpu_distributed_timeout_seconds data_parallel_backend"
        " data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index"
        " data_parallel_master_ip data_parallel_master_port data_parallel_rank"
        " data_parallel_rank_local data_parallel_rpc_port data_parallel_size"
        " data_parallel_size_local dbo_decode_token_threshold dbo_prefill_token_threshold"
        " dcp_comm_backend dcp_q_replicate disable_custom_all_reduce"
        " disable_nccl_for_dp_synchronization distributed_executor_backend"
        " distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size"
        " enable_batch_sharded_sampling enable_dbo enable_elastic_ep enable_ep_weight_filter"
        " enable_eplb enable_expert_parallel enable_fault_tolerance enable_hc_sp"
        " enable_shm_tensor_arena eplb_config expert_placement_strategy fault_tolerance_config"
        " is_moe_model master_addr master_port max_parallel_loading_workers nnodes node_rank"
        " numa_bind numa_bind_cpus numa_bind_nodes placement_group rank ray_runtime_env"
        " ray_workers_use_nsight ubatch_size worker_cls worker_extension_cls"
    ),
    "SchedulerConfig": (
        "async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager"
        " enable_chunked_prefill encoder_cache_size is_multimodal_model"
        " long_prefill_token_threshold long_prefill_token_threshold_adaptive"
        " max_num_active_seqs max_num_batched_tokens max_num_encoder_input_tokens"
        " max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs policy"
        " prefill_schedule_interval runner_type scheduler_cls scheduler_reserve_full_isl"
        " stream_interval watermark"
    ),
    "SpeculativeConfig": (
        "disable_eagle_block_drop disable_padded_drafter_batch draft_sample_method"
        " dspark_draft_topk enable_adaptive_verification enforce_eager num_speculative_tokens"
        " num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min"
        " rejection_sample_method suffix_decoding_max_cached_requests"
        " suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth"
        " suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates"
        " use_local_argmax_reduction"
    ),
    "VllmConfig": (
        "aux_output_config compilation_config ec_manager_config ec_transfer_config"
        " engram_config instance_id kv_events_config kv_transfer_config logging_config"
        " observability_config offload_config optimization_level performance_mode"
        " profiler_config reasoning_config shutdown_timeout structured_outputs_config"
        " watermark_config"
    ),
}


def configurations() -> dict[str, type[Any]]:
    """vLLM's classes of options, by name."""
    found: dict[str, type[Any]] = {}
    for module in pkgutil.iter_modules(vllm.config.__path__, "vllm.config."):
        for name, one in vars(importlib.import_module(module.name)).items():
            ours = str(getattr(one, "__module__", "")).startswith("vllm.config.")
            if ours and isinstance(one, type) and dataclasses.is_dataclass(one):
                found[name] = one
    return found


def fields(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(configurations()[name])}


def options_of(name: str) -> set[str]:
    return set(CHANGE_KV[PLACES[name]]) if name in PLACES else set()


def unset(options: type[Any], name: str) -> Any:
    """What it is where nobody sets it."""
    (field,) = [field for field in dataclasses.fields(options) if field.name == name]
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    default = getattr(value, "default", value)  # of pydantic's own fields
    factory = getattr(value, "default_factory", None)
    return factory() if factory is not None else default


def test_every_option_of_vllm_is_known() -> None:
    missing, gone = [], []
    for name in configurations():
        elsewhere, none = set(ELSEWHERE.get(name, {})), set(NO_KV.get(name, "").split())
        if name in NO_KV_AT_ALL or "*" in elsewhere:
            continue
        listed = [*elsewhere, *none, *options_of(name)]
        assert len(listed) == len(set(listed)), f"{name}: one place for each"
        missing += [f"{name}.{field}" for field in fields(name) - set(listed)]
        gone += [f"{name}.{field}" for field in set(listed) - fields(name)]
    assert not missing, f"say what they do to KV: {sorted(missing)}"
    assert not gone, f"vLLM does not have them: {sorted(gone)}"
    known = {*NO_KV_AT_ALL, *ELSEWHERE, *NO_KV}
    assert not known - set(configurations()), "classes that vLLM does not have"


def test_every_loader_of_vllm_is_known() -> None:
    others = {"dummy", "ipc_cache", "modelexpress", "tensorizer"}
    assert set(_LOAD_FORMAT_TO_MODEL_LOADER) == others | set(READ_THE_FILES)


def test_options_that_nobody_sets_are_those_of_vllm() -> None:
    for name, place in PLACES.items():
        for option, value in CHANGE_KV[place].items():
            assert unset(configurations()[name], option) in (value, None), f"{name}.{option}"


_PLAIN = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from kvwarehouse_connectors.vllm.kv_options import set_options
for more in ({}, {"enable_lora": True}, {"enable_lora": True, "lora_target_modules": ["q_proj"]}):
    config = EngineArgs(model=sys.argv[1], max_model_len=512, **more).create_engine_config()
    print("set:", json.dumps(set_options(config)))
"""


def test_plain_engine_has_set_none(tmp_path: Path) -> None:
    """Whatever vLLM and its platform put there by themselves. In a process of its own, because
    they also set variables."""
    checkpoint = Checkpoints(tmp_path).get("llama", 0)
    ran = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    said = [json.loads(line[4:]) for line in ran.stdout.splitlines() if line.startswith("set:")]
    assert said == [{}, {}, {"lora_config.target_modules": ["q_proj"]}]


def test_variables_that_change_kv_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENVIRONMENT.keys() <= set(vllm.envs.environment_variables)
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert set_options(engine_config([])) == {"VLLM_MARLIN_INPUT_DTYPE": "int8"}


def test_scales_of_an_encoder_count_by_their_content(tmp_path: Path) -> None:
    def digest(name: str, content: str) -> str:
        (tmp_path / name).write_text(content, encoding="utf-8")
        media = SimpleNamespace(mm_encoder_fp8_scale_path=str(tmp_path / name))
        return options_digest(engine_config([], multimodal_config=media))

    assert digest("one", "{}") == digest("another", "{}")
    assert digest("one", '{"q": 2}') != digest("another", "{}")


def test_types_of_states_count_where_a_model_has_states() -> None:
    engine = engine_config([])
    engine.cache_config.mamba_ssm_cache_dtype = "float32"
    assert set_options(engine) == {}
    engine.model_config.has_inner_state = True
    assert set_options(engine) == {"cache_config.mamba_ssm_cache_dtype": "float32"}


def test_set_options_are_the_same_in_every_process() -> None:
    engine = engine_config([], quantization_config={"linear": {"weight": torch.float16}})
    engine.additional_config = {"names": {"b", "a", "c"}}
    assert set_options(engine)["additional_config"] == {"names": ["a", "b", "c"]}
    assert " at 0x" not in str(set_options(engine))

"""What refuses an attach, what names an engine's weights, and what becomes of it when they change:
with SGLang's real factory, configuration and pools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from sglang.srt import runtime_context
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache import utils
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.sglang import WarehouseStorage, compat
from sglang_rig.engine import config, prompt
from sglang_rig.hybrid import state_pool
from sglang_rig.pools import PAGE, Shape


def storage_config(serving: Serving, extra: dict[str, Any], **changed: Any) -> HiCacheStorageConfig:
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny",
        "extra_config": config(serving.address, **extra),
        **changed,
    }
    return HiCacheStorageConfig(**values)


def with_engine(**fields: Any) -> Any:
    """SGLang's configuration in this process, as its scheduler has it."""
    return runtime_context.get_context().override_server_args(**fields)


@pytest.mark.parametrize(
    ("extra", "changed", "told"),
    [
        ({"kvwarehouse.adress": "x"}, {}, "known are address"),
        ({"kvwarehouse.verify": "never"}, {}, "is not one of always, boundary"),
        ({"kvwarehouse.weights": ""}, {}, "cannot fingerprint the weights"),
        ({"kvwarehouse.address": "ftp://x"}, {}, "ftp://x"),
        ({}, {"attn_cp_size": 2}, "attention context parallelism 2; served: attn_cp_size 1"),
        ({"interface_v1": 0}, {"tp_lcm_size": 2}, 'needs "interface_v1": 1'),
    ],
)
def test_what_cannot_be_served_is_refused_by_sglangs_factory(
    shared: Serving, extra: dict[str, Any], changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(kvw.UsageError) as refused:
        StorageBackendFactory.create_backend(
            "dynamic", storage_config(shared, extra, **changed), None
        )
    assert told in str(refused.value)


@pytest.mark.parametrize("older", ["no such function", "tokens alone", "no salt"])
def test_an_engine_whose_keys_leave_out_salts_is_refused(
    shared: Serving, monkeypatch: pytest.MonkeyPatch, older: str
) -> None:
    """Incident: before 0.5.23 users of different salts shared what was stored."""
    seed = utils.storage_namespace_seed
    if older == "no such function":
        monkeypatch.delattr(utils, "get_storage_hash_str")
    elif older == "tokens alone":
        monkeypatch.setattr(utils, "storage_namespace_seed", lambda *_: None)
    else:
        monkeypatch.setattr(utils, "storage_namespace_seed", lambda extra, _: seed(extra, None))
    with pytest.raises(kvw.UsageError, match="cache_salt") as refused:
        WarehouseStorage(storage_config(shared, {}), {})
    assert refused.value.code == "unsupported"


def test_requests_of_different_salts_share_nothing(start: Any, shared: Serving, seed: int) -> None:
    engine = start(shared.address)
    tokens = prompt(seed, 3)
    engine.store(tokens, seed, salt="one")
    assert engine.prefetch(tokens, salt="one").hit == 3 * PAGE
    assert engine.prefetch(tokens, salt="other").hit == 0
    assert engine.prefetch(tokens).hit == 0


def test_a_refused_attach_leaves_the_controller_without_storage(
    start: Any, shared: Serving, seed: int
) -> None:
    with pytest.raises(kvw.UsageError, match="tp_lcm_size 2 with tp_size 1 in layout page_first"):
        start(shared.address, Shape("page_first"), tp_lcm_size=2)
    engine = start(shared.address)
    assert engine.store(prompt(seed, 2), seed)[0] == 2 * PAGE


def test_a_pool_that_is_not_known_is_refused_by_name(shared: Serving) -> None:
    class NewPool(MambaPoolHost):
        pass

    pool = state_pool("page_first")
    pool.__class__ = NewPool
    storage = WarehouseStorage(storage_config(shared, {}), {})
    try:
        with pytest.raises(kvw.UsageError, match="host pool mamba NewPool; served"):
            storage.register_mem_host_pool_v2(pool, "mamba")
    finally:
        storage.close()


def test_the_backend_is_what_sglang_asks_for() -> None:
    assert issubclass(WarehouseStorage, HiCacheStorage)
    ours = {name for name in vars(WarehouseStorage) if not name.startswith("_")}
    theirs = {name for name in vars(HiCacheStorage) if not name.startswith("_")}
    assert theirs - ours == {"on_host_pools_registered"}


def test_every_name_of_the_configuration_that_is_read_exists_in_this_version() -> None:
    known = set(namespace_of(ServerArgs))
    read = (*compat._CONFIG, *compat._CHECKPOINTS)
    assert [name for name in read if name not in known] == []
    others = ("model_path", "nnodes", "tp_size", "pp_size", "load_format", "revision", "lora_paths")
    more = ("download_dir", "speculative_algorithm", "weight_version")
    assert [name for name in (*others, *more) if name not in known] == []


def checkpoint(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}" + content)
    return folder


def test_engines_share_by_the_content_of_their_checkpoint_and_their_configuration(
    start: Any, shared: Serving, tmp_path: Path, seed: int
) -> None:
    tokens, unnamed = prompt(seed, 3), {"kvwarehouse.weights": ""}
    path = checkpoint(tmp_path / "model", b"")
    with with_engine(model_path=str(path)):
        first = start(shared.address, **unnamed)
        first.store(tokens, seed)
        assert start(shared.address, **unnamed).prefetch(tokens).hit == 3 * PAGE
    (path / "config.json").write_text("{}")
    with with_engine(model_path=str(path)):
        assert start(shared.address, **unnamed).prefetch(tokens).hit == 0
    checkpoint(path, b"")
    with with_engine(model_path=str(path), kv_cache_dtype="fp8_e5m2"):
        assert start(shared.address, **unnamed).prefetch(tokens).hit == 0
    with with_engine(model_path=str(path)):
        assert start(shared.address, **unnamed).prefetch(tokens).hit == 3 * PAGE
    with (
        with_engine(model_path=str(path), speculative_algorithm="EAGLE"),
        pytest.raises(kvw.UsageError, match="speculative decoding by EAGLE"),
    ):
        start(shared.address, **unnamed)


def test_engines_that_compute_with_other_weights_than_the_models_share_nothing(
    start: Any, shared: Serving, tmp_path: Path, seed: int
) -> None:
    """Incident: one model_path was one namespace, whatever else SGLang was told to compute with."""
    tokens, unnamed = prompt(seed, 3), {"kvwarehouse.weights": ""}
    path = str(checkpoint(tmp_path / "model", b""))
    others = [str(tmp_path / name) for name in ("one.bin", "two.bin")]
    for other in others:
        Path(other).write_text(other)
    changes: list[dict[str, Any]] = [{}, {"modelopt_checkpoint_restore_path": others[0]}]
    changes += [{"kt_weight_path": other} for other in others]
    changes += [{**changes[-1], "kt_num_gpu_experts": 2}, {**changes[-1], "kt_method": "BF16"}]
    changes += [{**changes[-3], "kt_max_deferred_experts_per_token": 1}, {"rl_quant_profile": "p"}]
    for changed in changes:
        with with_engine(model_path=path, **changed):
            engine = start(shared.address, **unnamed)
            assert engine.prefetch(tokens).hit == 0, changed
            engine.store(tokens, seed)
            assert start(shared.address, **unnamed).prefetch(tokens).hit == 3 * PAGE
    with (
        with_engine(model_path=path, kt_weight_path=str(tmp_path / "gone")),
        pytest.raises(kvw.UsageError, match=r"gone is not a path.*Set kvwarehouse\.weights"),
    ):
        start(shared.address, **unnamed)


def on_the_hub(cache: Path, commit: str, **files: bytes) -> None:
    """In the local cache of the hub: the adapter org/adapter at this commit, with these files."""
    repository = cache / "models--org--adapter"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)


@pytest.mark.parametrize("download_dir", [False, True], ids=["hub's cache", "download_dir"])
def test_an_adapter_of_the_hub_with_a_new_revision_shares_nothing(
    start: Any,
    shared: Serving,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    download_dir: bool,
    seed: int,
) -> None:
    """Incident: SGLang's keys name an adapter by its path, and so did the namespace. After a new
    revision the engine loaded the KV of the old one."""
    hub, tokens = tmp_path / "hub", prompt(seed, 3)
    weights = tmp_path / "downloads" if download_dir else hub
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    fields = {
        "model_path": str(checkpoint(tmp_path / "model", b"")),
        "lora_paths": [LoRARef(lora_id="1", lora_name="a", lora_path="org/adapter")],
        "download_dir": str(weights) if download_dir else None,
    }
    revisions = [(b"{}", b"one"), (b"{}", b"two"), (b'{"lora_alpha": 2}', b"two")]
    for number, (told, content) in enumerate(revisions):
        files = {"adapter_config__json": told, "adapter_model__bin": content}
        if download_dir:
            on_the_hub(hub, str(number), adapter_config__json=files.pop("adapter_config__json"))
        on_the_hub(weights, str(number), **files)
        with with_engine(**fields):
            engine = start(shared.address, **{"kvwarehouse.weights": ""})
            assert engine.prefetch(tokens).hit == 0
            engine.store(tokens, seed)
            again = start(shared.address, **{"kvwarehouse.weights": ""})
            assert again.prefetch(tokens).hit == 3 * PAGE


def test_when_the_weights_change_nothing_is_loaded_or_stored_any_more(
    start: Any, shared: Serving, tmp_path: Path, seed: int
) -> None:
    path, tokens = checkpoint(tmp_path / "model", b""), prompt(seed, 3)
    with with_engine(model_path=str(path)):
        engine = start(shared.address, **{"kvwarehouse.weights": ""})
        engine.store(tokens, seed)
        assert engine.prefetch(tokens).hit == 3 * PAGE
        runtime_context.get_context().override("test", weight_version="step-2")
        assert engine.prefetch(tokens).hit == 0
        assert engine.store(prompt(seed + 1, 3), seed)[0] == 0
        with pytest.raises(kvw.UsageError, match="they were changed since this engine began"):
            start(shared.address, **{"kvwarehouse.weights": ""})
        again = start(shared.address, **{"kvwarehouse.weights": "step-2"})
        assert again.prefetch(tokens).hit == 0
        assert again.store(tokens, seed)[0] == 3 * PAGE

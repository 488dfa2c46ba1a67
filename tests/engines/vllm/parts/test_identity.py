"""Namespaces of engines: equal exactly where their blocks mean the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import psutil
import torch
from huggingface_hub import ResolvedRevision
from safetensors.numpy import save_file

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.vllm import compat, loaded_files
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from kvwarehouse_connectors.vllm.identity import (
    Shared,
    namespaces,
    one_of_all,
    weights_fingerprint,
)
from kvwarehouse_connectors.vllm.messages import CacheInfo, GroupInfo
from kvwarehouse_connectors.vllm.settings import read_settings
from vllm_parts.halves import engine_config
from vllm_parts.specs import config, full, window

GROUPS = cache_groups(config(full(16), window(16, 64)))
SEEN = GroupInfo(4096, "layout", "float16/auto", "CPU_ATTN/AVX512/vec")
CACHE_INFO = CacheInfo((SEEN, SEEN), "cpu", 1 << 28)
SHARED = Shared("weights", "scheme", 1, "")


def model(**fields: Any) -> Any:
    return engine_config([], **fields)


def ids(
    engine: Any = None,
    *,
    groups: tuple[CacheGroup, ...] = GROUPS,
    cache_info: CacheInfo = CACHE_INFO,
    shared: Shared = SHARED,
) -> list[bytes]:
    return [space.id for space in namespaces(engine or model(), groups, cache_info, shared)]


def hf(**values: Any) -> Any:
    return SimpleNamespace(to_dict=lambda: {"hidden_size": 8, **values})


def seen(**fields: Any) -> CacheInfo:
    return replace(CACHE_INFO, groups=(replace(SEEN, **fields),) * 2)


def relabelled(**fields: Any) -> tuple[CacheGroup, ...]:
    return tuple(replace(group, **fields) for group in GROUPS)


def set_to(place: str, value: Any) -> Any:
    """An engine with one option set. place: in its configuration."""
    engine, *_ = made = [model()]
    *parts, name = place.split(".")
    for part in parts:
        if not hasattr(made[-1], part):
            setattr(made[-1], part, SimpleNamespace())
        made.append(getattr(made[-1], part))
    setattr(made[-1], name, value)
    return engine


OPTIONS: dict[str, tuple[str, Any]] = {
    "--mm-processor-kwargs": (
        "model_config.multimodal_config.mm_processor_kwargs",
        {"max_pixels": 200704},
    ),
    "--media-io-kwargs": (
        "model_config.multimodal_config.media_io_kwargs",
        {"video": {"num_frames": 40}},
    ),
    "--video-pruning-rate": ("model_config.multimodal_config.video_pruning_rate", 0.5),
    "--quantization-config": (
        "model_config.quantization_config",
        {"linear": {"weight": "mxfp8"}},
    ),
    "--model-impl": ("model_config.model_impl", "transformers"),
    "--model-class-overrides": ("model_config.model_class_overrides", {"A": "module:B"}),
    "--lora-target-modules": ("lora_config.target_modules", ["q_proj"]),
    "--lora-dtype": ("lora_config.lora_dtype", torch.bfloat16),
    "--kv-cache-dtype-skip-layers": ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "--additional-config": ("additional_config", {"gdn_prefill_backend": "triton"}),
}


DIFFERENT: dict[str, Callable[[], list[bytes]]] = {
    "weights": lambda: ids(shared=replace(SHARED, weights="others")),
    "hashes": lambda: ids(shared=replace(SHARED, hash_scheme="others")),
    "shards": lambda: ids(shared=replace(SHARED, shards=2)),
    "salt": lambda: ids(shared=replace(SHARED, salt="tenant")),
    "model": lambda: ids(model(model="folder/other")),
    "config": lambda: ids(model(hf_config=hf(rope_theta=1e6))),
    "dtype": lambda: ids(model(dtype=torch.bfloat16)),
    "quantization": lambda: ids(model(quantization="fp8")),
    **{name: lambda name=name: ids(set_to(*OPTIONS[name])) for name in OPTIONS},  # type: ignore[misc]
    "bytes of a page": lambda: ids(cache_info=seen(page_bytes=8192)),
    "layout": lambda: ids(cache_info=seen(layout="other")),
    "type of KV": lambda: ids(cache_info=seen(kv_dtype="uint8/fp8")),
    "backend": lambda: ids(cache_info=seen(attention_backend="CPU_ATTN/AVX2/vec")),
    "device": lambda: ids(cache_info=replace(CACHE_INFO, device="cuda")),
    "tokens of a block": lambda: ids(groups=relabelled(block_tokens=32)),
    "reach": lambda: ids(groups=relabelled(reach_tokens=128)),
    "layers": lambda: ids(groups=relabelled(layer_names=("another",))),
    "place among the groups": lambda: ids(groups=relabelled(index=5)),
}


def test_groups_of_one_engine_are_apart_though_they_look_the_same() -> None:
    assert len(set(ids())) == 2


@pytest.mark.parametrize("name", DIFFERENT)
def test_engines_that_differ_share_nothing(name: str) -> None:
    assert not set(DIFFERENT[name]()) & set(ids())


def test_another_version_of_vllm_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids()
    monkeypatch.setattr(compat, "VERSION", "0.99.0")
    assert not set(ids()) & set(before)


@pytest.mark.parametrize(
    "same",
    [
        lambda: ids(),
        lambda: ids(model(model="another/folder/tiny")),
        lambda: ids(model(hf_config=hf(_name_or_path="/x", transformers_version="9"))),
        lambda: ids(cache_info=replace(CACHE_INFO, staging_bytes=1 << 20)),
    ],
)
def test_what_changes_no_kv_changes_no_namespace(same: Callable[[], list[bytes]]) -> None:
    assert same() == ids()


def test_ranks_whose_gpus_have_unequal_memory_start_with_the_least_of_it() -> None:
    """Two GPUs of one kind had a few MiB between them, and by default the memory for stores follows
    from that: the engine was refused."""
    more, less = CACHE_INFO, replace(CACHE_INFO, staging_bytes=CACHE_INFO.staging_bytes - 4096)
    for by_rank in ({(0, 0): more, (0, 1): less}, {(0, 0): less, (0, 1): more}):
        assert one_of_all(by_rank) == (less, "")
    with pytest.raises(kvw.UsageError, match="2 kinds"):
        one_of_all({(0, 0): more, (0, 1): seen(page_bytes=8192)})


def test_only_group_of_a_model_needs_no_name() -> None:
    (space,) = namespaces(model(), GROUPS[:1], replace(CACHE_INFO, groups=(SEEN,)), SHARED)
    assert space.cache_group == ""


# -- weights ---------------------------------------------------------------------------------------


def weights_of(folder: Path, *, load_format: str = "auto", **settings: Any) -> str:
    engine = model(model=str(folder), revision=None)
    engine.load_config = SimpleNamespace(load_format=load_format, download_dir=None)
    loaded_files.began()
    return _fingerprint_of(engine, **settings)


def _fingerprint_of(engine: Any, **settings: Any) -> str:
    extra = {f"kvwarehouse.{name}": value for name, value in settings.items()}
    return weights_fingerprint(engine, read_settings(extra, "kv_both"))


def checkpoint(folder: Path, value: float) -> Path:
    folder.mkdir()
    save_file({"w": np.full((64, 64), value, np.float32)}, folder / "model.safetensors")
    return folder


def test_weights_are_told_apart_by_their_content(tmp_path: Path) -> None:
    one, same = checkpoint(tmp_path / "one", 1.0), checkpoint(tmp_path / "same", 1.0)
    other = checkpoint(tmp_path / "other", 2.0)
    assert weights_of(one) == weights_of(same)
    assert weights_of(one) != weights_of(other)


def test_name_that_was_given_stands_for_the_weights(tmp_path: Path) -> None:
    assert weights_of(tmp_path / "absent", weights="seven") == "seven"
    assert weights_of(tmp_path / "absent", load_format="dummy", weights="seven") == "seven"


@pytest.mark.parametrize(
    ("name", "load_format", "words"),
    [
        ("one", "dummy", "dummy"),
        ("one", "tensorizer", "tensorizer"),
        ("one", "a-loader-of-a-plugin", "a-loader-of-a-plugin"),
        ("no-such-model", "auto", "no-such-model"),
    ],
)
def test_weights_that_cannot_be_read_are_refused_with_what_to_do(
    name: str, load_format: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    checkpoint(tmp_path / "one", 1.0)
    with pytest.raises(kvw.UsageError, match=words) as refused:
        weights_of(tmp_path / name, load_format=load_format)
    assert refused.value.code == "no_weights"
    assert "kvwarehouse.weights" in str(refused.value)


# -- weights that change while an engine starts ----------------------------------------------------


def later(change: Callable[[], None], place: Path) -> None:
    """After the engine began by the clock of the file system, too, which has longer ticks."""

    def changed() -> bool:
        change()
        return place.lstat().st_ctime > loaded_files.began_s()

    eventually(changed, f"{place} is newer than the engine")


def loading(model_path: Path) -> Any:
    """An engine that has begun, and loads this."""
    engine = model(model=str(model_path), revision=None)
    engine.load_config = SimpleNamespace(load_format="auto", download_dir=None)
    loaded_files.began()
    return engine


def shared_by_all(engine: Any) -> bool:
    return _fingerprint_of(engine) == _fingerprint_of(engine)


def test_weights_that_were_written_to_after_the_engine_began_are_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer wrote the next checkpoint over the one that an engine had just loaded: KV of the
    old weights was stored under the fingerprint of the new ones."""
    engine = loading(checkpoint(tmp_path / "one", 1.0))
    assert shared_by_all(engine)
    assert not caplog.records
    written = tmp_path / "one" / "model.safetensors"
    later(lambda: save_file({"w": np.full((64, 64), 2.0, np.float32)}, written), written)
    assert not shared_by_all(engine)
    assert str(written) in caplog.text
    assert "start it again" in caplog.text
    assert shared_by_all(loading(tmp_path / "one")), "of an engine that begins now they are known"


def test_folder_that_was_put_in_the_place_of_the_loaded_one_is_seen(tmp_path: Path) -> None:
    checkpoint(tmp_path / "served", 1.0)
    following = checkpoint(tmp_path / "next", 2.0)
    engine = loading(tmp_path / "served")
    (tmp_path / "served").rename(tmp_path / "old")
    following.rename(tmp_path / "served")
    places = [following, tmp_path / "served"]

    def back_and_forth() -> None:
        for _ in range(2):
            places[1].rename(places[0])
            places.reverse()

    later(back_and_forth, tmp_path / "served")
    assert not shared_by_all(engine)


def test_link_that_leads_to_another_checkpoint_since_is_seen(tmp_path: Path) -> None:
    checkpoint(tmp_path / "step-1", 1.0)
    checkpoint(tmp_path / "step-2", 2.0)
    (tmp_path / "current").symlink_to("step-1")
    (tmp_path / "served").symlink_to(tmp_path / "current")
    engine = loading(tmp_path / "served")
    assert shared_by_all(engine)

    def turn() -> None:
        (tmp_path / "turned").symlink_to("step-2")
        (tmp_path / "turned").rename(tmp_path / "current")

    later(turn, tmp_path / "current")
    assert not shared_by_all(engine)


def test_what_is_beside_the_weights_may_change(tmp_path: Path) -> None:
    checkpoint(tmp_path / "one", 1.0)
    (tmp_path / "one" / "loop").symlink_to(tmp_path / "one")
    engine = loading(tmp_path / "one")
    hidden = tmp_path / "one" / ".lock"
    later(lambda: hidden.write_text("held", encoding="utf-8"), hidden)
    later(lambda: os.utime(tmp_path), tmp_path)
    assert shared_by_all(engine)


def snapshot(hub: Path, commit: str, value: float) -> None:
    """A model of the hub as it lies in its cache, of which `main` is this commit."""
    folder = hub / "models--org--model"
    blob = folder / "blobs" / f"blob-of-{commit}"
    there = folder / "snapshots" / commit
    for made in (blob.parent, there, folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.full((64, 64), value, np.float32)}, blob)
    (there / "model.safetensors").symlink_to(blob)
    (folder / "refs" / "main").write_text(commit, encoding="utf-8")


OLD, NEW = "0" * 40, "1" * 40


def of_the_hub(hub: Path, commit: str | None) -> Any:
    """An engine that has begun. commit: that vLLM has found for its revision; None: it could not
    ask."""
    revision = ResolvedRevision(commit, None, "org/model") if commit else None
    engine = model(model="org/model", revision=revision)
    engine.load_config = SimpleNamespace(load_format="auto", download_dir=str(hub))
    loaded_files.began()
    return engine


def test_model_that_the_engine_downloads_at_its_start_is_shared(tmp_path: Path) -> None:
    """Its files are there after the engine began, and before it loads them."""
    engine = of_the_hub(tmp_path, OLD)
    later(lambda: snapshot(tmp_path / os.urandom(4).hex(), OLD, 1.0), tmp_path)
    snapshot(tmp_path, OLD, 1.0)
    assert shared_by_all(engine)


def test_revision_that_came_to_the_hubs_cache_since_is_seen(tmp_path: Path) -> None:
    """By an engine that did not ask the hub which commit its revision is. With the commit it has
    loaded that snapshot, whatever another engine puts beside it."""
    snapshot(tmp_path, OLD, 1.0)
    engine, without = of_the_hub(tmp_path, OLD), of_the_hub(tmp_path, None)
    assert shared_by_all(engine)
    assert shared_by_all(without)
    of_old = _fingerprint_of(engine)
    snapshot(tmp_path, NEW, 2.0)
    main = tmp_path / "models--org--model" / "refs" / "main"
    later(lambda: os.utime(main), main)
    assert _fingerprint_of(engine) == of_old
    assert not shared_by_all(without)
    assert _fingerprint_of(of_the_hub(tmp_path, NEW)) != of_old


def test_snapshot_of_another_commit_than_the_engine_loads_is_not_its_own(tmp_path: Path) -> None:
    snapshot(tmp_path, NEW, 2.0)
    path = str(tmp_path / "models--org--model" / "snapshots" / NEW)
    seen_by = of_the_hub(tmp_path, OLD).model_config
    assert loaded_files.changed_file(seen_by, "org/model", path) == path


def test_engine_begins_with_its_process_where_nobody_says_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded_files, "_began_s", 0.0)
    assert abs(loaded_files.began_s() - psutil.Process().create_time()) < DEADLINE_S
    before_s = time.time()
    loaded_files.began()
    assert before_s <= loaded_files.began_s() <= time.time()


# -- hashes ----------------------------------------------------------------------------------------


def scheme(algorithm: str) -> str:
    engine = model()
    engine.cache_config.prefix_caching_hash_algo = algorithm
    return compat.hash_scheme(engine)


def test_scheme_is_named_by_the_function_and_what_it_answers() -> None:
    assert scheme("sha256").startswith("vllm/sha256/")
    assert scheme("sha256") == scheme("sha256")
    assert scheme("sha256") != scheme("sha256_cbor")


def scheme_of_another_process(seed: str | None) -> str:
    code = (
        "from types import SimpleNamespace as N\n"
        "from kvwarehouse_connectors.vllm import compat\n"
        "print(compat.hash_scheme(N(cache_config=N(prefix_caching_hash_algo='sha256'))))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment if seed is None else {**environment, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return ran.stdout.split()[-1]


def test_scheme_is_the_same_in_every_process_of_the_same_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or nothing that is stored would ever be found again. vLLM hashes from PYTHONHASHSEED, where
    that is set: other seeds are other names, and no hits."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    here = scheme("sha256")
    assert scheme_of_another_process(None) == here
    seven = scheme_of_another_process("7")
    assert seven != here
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert scheme("sha256") == seven

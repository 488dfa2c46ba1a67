"""What cannot be served refuses the start: it says what was found and what is served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.trtllm import compat
from kvwarehouse_connectors.trtllm.connector import WarehouseScheduler, WarehouseWorker
from kvwarehouse_connectors.trtllm.parts import layout_cache, pool_cache
from trtllm_model import interface
from trtllm_model.collectives import RankFailedError
from trtllm_model.pools import HostTensor, PoolLayout
from trtllm_model.ranks import Engine

Start = Callable[..., Engine]


def config(**values: Any) -> SimpleNamespace:
    defaults = {"tokens_per_block": 8, "dtype": "auto", "max_attention_window": None}
    return SimpleNamespace(**{**defaults, **values})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2; served: 1"),
        ({"context_parallel_size": 2}, "context_parallel_size = 2; served: 1"),
        ({"max_beam_width": 4}, "max_beam_width = 4; served: 1"),
        ({"enable_attention_dp": True}, "enable_attention_dp; served: false"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"sparse_attention_config": object()}, "sparse_attention_config"),
        (
            {"ray_worker_extension_cls": "rlhf.Extension"},
            "ray_worker_extension_cls = rlhf.Extension",
        ),
        ({"sleep_config": object()}, "while it sleeps (sleep_config)"),
        ({"enable_sleep": True}, "while it sleeps (enable_sleep)"),
        ({"tensor_parallel_size": 16}, "16 ranks on hosts of 8"),
        ({"tensor_parallel_size": 128, "gpus_per_node": 0}, "128 ranks"),
        ({"kv_cache_config": config(max_attention_window=[128, 4096])}, "windows of"),
        ({"kv_cache_config": config(tokens_per_block=7)}, "tokens_per_block = 7"),
        ({"kv_connector_config": SimpleNamespace(server_url="tcp://far:1")}, "unix:///path"),
    ],
)
def test_engine_that_cannot_be_served_is_refused_by_name(
    arguments: dict[str, Any], says: str, start: Start
) -> None:
    with pytest.raises(kvw.UsageError) as refused:
        start(arguments=arguments)
    assert says in str(refused.value)


def test_weights_that_are_in_no_file_need_a_name(
    start: Start, environment: pytest.MonkeyPatch
) -> None:
    environment.delenv("TLLM_KVW_WEIGHTS")
    with pytest.raises(kvw.UsageError, match="TLLM_KVW_WEIGHTS"):
        start()


def test_weights_that_are_files_are_named_by_their_content(
    start: Start, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.delenv("TLLM_KVW_WEIGHTS")
    spaces = []
    for content in (b"one", b"two"):
        (tmp_path / "model.bin").write_bytes(content)
        engine = start(arguments={"model": str(tmp_path), "load_format": "auto"})
        spaces.append(engine.scheduler.cache_info.spaces[0].id)
    assert spaces[0] != spaces[1]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"model_kwargs": {"rope_theta": 1}},
        {"attn_backend": "FLASHINFER"},
        {"max_seq_len": 8192},
        {"kv_cache_config": config(dtype="fp8")},
    ],
)
def test_engines_whose_bytes_differ_have_other_namespaces(
    other: dict[str, Any], start: Start
) -> None:
    one, two = start(), start(arguments=other)
    assert one.scheduler.cache_info.spaces[0].id != two.scheduler.cache_info.spaces[0].id


def test_ranks_that_differ_end_the_engine_in_its_first_step(start: Start) -> None:
    engine = start(ranks=2, rank_arguments={1: {"dtype": "float16"}})
    with pytest.raises(RankFailedError, match="Start all ranks alike"):
        engine.serve([1, 2, 3], 2)


def test_rank_outside_of_the_engine_is_refused(start: Start, monkeypatch: Any) -> None:
    monkeypatch.setattr(compat, "rank", lambda: 3)
    with pytest.raises(kvw.UsageError, match="rank 3 of 1"):
        start()


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((4, 3, 64), r"shape \(4, 3, 64\) \(served: \[blocks, layers, 1 or 2"),
        ((4, 3, 3, 64), r"shape \(4, 3, 3, 64\)"),
        ((0, 3, 2, 64), r"shape \(0, 3, 2, 64\)"),
        ((4, 3, 2, 60), "does not divide"),
    ],
)
def test_pool_of_an_unknown_shape_is_refused(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(kvw.UsageError, match=says):
        pool_cache(HostTensor(np.zeros(shape, np.uint8)), 8)


def test_pool_that_is_not_contiguous_is_refused() -> None:
    array = np.zeros((4, 3, 2, 128), np.uint8)[..., ::2]
    with pytest.raises(kvw.UsageError, match="strides"):
        pool_cache(HostTensor(array), 8)


def layout(**changes: Any) -> Any:
    """With a window, one group or region changed. changes: of the second group, or of its first
    region as region_NAME."""
    made = PoolLayout(0, 8, 8, (20,))
    group = made.groups[1]
    of_region = {
        n.removeprefix("region_"): v for n, v in changes.items() if n.startswith("region_")
    }
    of_group = {n: v for n, v in changes.items() if not n.startswith("region_")}
    first = SimpleNamespace(**{**vars(group.regions[0]), "as_tensor": None, **of_region})
    values = {**vars(group), "regions": (first, *group.regions[1:]), **of_group}
    return SimpleNamespace(
        tokens_per_block=8, groups=(made.groups[0], SimpleNamespace(**values)), made=made
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_group_id": 0}, r"layer groups \[0, 0\]"),
        ({"layer_group_id": -1}, r"layer groups \[0, -1\]"),
        ({"window_size": 0}, "window of 0 tokens"),
        ({"region_num_slots": 3}, r"regions of \[3, 7\] slots"),
        ({"region_size": 0}, "region of 0 bytes"),
        ({"region_stride": 1}, "bytes every 1"),
    ],
)
def test_layout_of_an_unknown_kind_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(kvw.UsageError, match=says):
        layout_cache(layout(**changes))


def test_layout_without_groups_is_refused() -> None:
    with pytest.raises(kvw.UsageError, match="no layer group"):
        layout_cache(SimpleNamespace(tokens_per_block=8, groups=()))


def test_revision_that_asks_for_what_is_not_known_is_refused() -> None:
    def offload(self: Any) -> None: ...

    offload.__isabstractmethod__ = True  # type: ignore[attr-defined]
    base = type("Base", (interface.KvCacheConnectorWorker,), {"offload": offload})
    shell = type("Shell", (WarehouseWorker, base), {})
    with pytest.raises(kvw.UsageError, match="asks connectors for offload"):
        compat.check_interface(shell)


def test_revision_that_calls_otherwise_is_refused() -> None:
    class Base:
        def request_finished(self, request: Any, blocks: Any, reason: Any) -> bool:
            return False

    class Shell(Base):
        def request_finished(self, request: Any, blocks: Any) -> bool:  # type: ignore[override]
            return False

    with pytest.raises(kvw.UsageError, match="calls request_finished with 3 arguments, not 2"):
        compat.check_interface(Shell)


def test_scheduler_without_a_worker_beside_it_is_refused(serving: Serving) -> None:
    from trtllm_model.ranks import Spec, llm_args

    scheduler = WarehouseScheduler(llm_args(Spec(), serving.address))
    try:
        with pytest.raises(kvw.UsageError, match="registered no KV cache"):
            scheduler.wait_for_initialization()
    finally:
        scheduler.shutdown()


SCRIPT = """
import sys
from trtllm_model import interface
interface.install(sys.argv[1])
from trtllm_model.ranks import Engine, Spec
from kvwarehouse_connectors.trtllm import compat
tokens = list(range(60))
engines = [Engine(Spec(revision=sys.argv[1], ranks=2), sys.argv[2]) for _ in range(2)]
engines[0].ready().serve(tokens, 2)
engines[0].wait_stored(7)
print(compat.VERSION, engines[1].ready().serve(tokens, 2))
for engine in engines:
    engine.__exit__(None, None, None)
"""


@pytest.mark.parametrize("revision", ["old", "new"])
def test_interface_is_found_where_each_revision_has_it(revision: str, serving: Serving) -> None:
    """In a process of its own: the connector is imported once."""
    folder = str(Path(__file__).parents[2] / "support")
    script = f"import sys; sys.path.insert(0, {folder!r})\n{SCRIPT}"
    ran = subprocess.run(
        [sys.executable, "-c", script, revision, serving.address],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.stdout.split() == [interface.VERSIONS[revision], "56"], ran.stderr


def test_installation_without_the_interface_says_where_it_was_looked_for() -> None:
    script = "import kvwarehouse_connectors.trtllm.connector"
    modules = ["tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.pyexecutor"]
    made = "".join(
        f"m = types.ModuleType({name!r}); m.__path__ = []; sys.modules[{name!r}] = m\n"
        for name in modules
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys, types\n{made}{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode
    for path in interface.PATHS.values():
        assert path in ran.stderr

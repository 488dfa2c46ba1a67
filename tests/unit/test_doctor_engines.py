"""What the doctor says of made-up machines with SGLang and TensorRT-LLM: each fault is named once,
with what to do about it. What it says of daemons is the same for all engines (test_doctor_vllm)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvwarehouse.host import Finding, Verdict, healthy
from kvwarehouse_connectors.doctor.engines import engine_of
from kvwarehouse_connectors.doctor.facts import (
    ConfigFacts,
    DaemonFacts,
    EngineFacts,
    Facts,
    HostFacts,
    PageFacts,
    SoftwareFacts,
)

GIB = 1 << 30
SOCKET = "/run/kvw/kvw.sock"
EXTRA: dict[str, Any] = {
    "backend_name": "kvwarehouse",
    "module_path": "kvwarehouse_connectors.sglang",
    "class_name": "WarehouseStorage",
    "interface_v1": 1,
    "kvwarehouse.address": f"unix://{SOCKET}",
}
NAMED = {
    "connector_module": "kvwarehouse_connectors.trtllm",
    "connector_scheduler_class": "WarehouseScheduler",
    "connector_worker_class": "WarehouseWorker",
    "server_url": f"unix://{SOCKET}",
}
YAML: dict[str, Any] = {
    "kv_connector_config": NAMED,
    "kv_cache_config": {"enable_partial_reuse": False},
}
CONFIGS = {"sglang": EXTRA, "trtllm": YAML}
VERSIONS = {"sglang": "0.5.23", "trtllm": "1.2.0"}
# Neither has been run in a server on a device, and the doctor says so of every machine.
SAID = {"sglang": {"device"}, "trtllm": {"tensorrt_llm"}}


def machine(
    name: str,
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    **changes: dict[str, Any],
) -> Facts:
    """Nothing wrong with it, but for what is given: fields of the parts of Facts."""
    engine, config = engine_of(name), CONFIGS[name] if config is None else config
    module, environment = engine.SERVED.module, environment or {}
    facts = Facts(
        software=SoftwareFacts(
            python="/venv/bin/python",
            versions={"kvwarehouse": "0.1.0", module: VERSIONS[name], "grpcio": "1.80"},
            engine_distributions=(module,),
        ),
        engine=EngineFacts(
            version=VERSIONS[name],
            torch="2.13.0",
            device="cuda",
            device_name="H100",
            registered=True,
        ),
        host=HostFacts(available_bytes=64 * GIB, shm_bytes=128 * GIB, user=1000),
        daemon=DaemonFacts(
            address=f"unix://{SOCKET}",
            path=SOCKET,
            exists=True,
            is_socket=True,
            owner=1000,
            accessible=True,
            service_exists=True,
            status={
                "version": "0.1.0",
                "state": "serving",
                "core": {
                    "page_bytes_max": 256 << 20,
                    "tiers": {"dram": {"capacity_bytes": 64 * GIB}, "nvme": {"health": "off"}},
                },
            },
        ),
        environment=environment,
        config=ConfigFacts(given=True, values=config),
        settings=engine.settings_of(config, environment),
        page=PageFacts(model="llama", tokens=64, page_bytes=8 << 20),
    )
    parts = {part: replace(getattr(facts, part), **fields) for part, fields in changes.items()}
    return replace(facts, **parts)


def extra(**changes: Any) -> Facts:
    """SGLang's extra config with other values; None: without. A dot in a name is written __."""
    values = {**EXTRA, **{name.replace("__", "."): value for name, value in changes.items()}}
    return machine("sglang", {name: value for name, value in values.items() if value is not None})


def yaml(environment: Mapping[str, str] | None = None, **changes: Any) -> Facts:
    values = {name: value for name, value in {**YAML, **changes}.items() if value is not None}
    return machine("trtllm", values, environment)


def without_server_url(**environment: str) -> Facts:
    named = {name: value for name, value in NAMED.items() if name != "server_url"}
    return yaml(environment, kv_connector_config=named)


ABSENT: dict[str, Any] = {"version": "", "device": "", "registered": False}

# The engine, the machine, the check that must name the fault, how bad it is, words of the finding.
FAULTS: dict[str, tuple[str, Facts, str, Verdict, str]] = {
    "no sglang": (
        "sglang",
        machine("sglang", software={"engine_distributions": ()}, engine=ABSENT),
        "sglang",
        Verdict.FAIL,
        "pip install 'kvwarehouse[sglang]'",
    ),
    "an sglang that cannot be imported": (
        "sglang",
        machine("sglang", engine={**ABSENT, "engine_error": "ImportError: sgl_kernel"}),
        "sglang",
        Verdict.FAIL,
        "sgl_kernel",
    ),
    "an older sglang": (
        "sglang",
        machine("sglang", engine={"version": "0.5.22.post1"}),
        "sglang",
        Verdict.FAIL,
        "SGLang 0.5.23 or newer",
    ),
    "a newer sglang": (
        "sglang",
        machine("sglang", engine={"version": "0.6.0"}),
        "sglang",
        Verdict.WARN,
        "been run on 0.5.23 and nothing newer",
    ),
    "a connector that sglang does not take": (
        "sglang",
        machine("sglang", engine={"connector_error": "TypeError: must inherit"}),
        "connector",
        Verdict.FAIL,
        "must inherit",
    ),
    "a factory that takes others": (
        "sglang",
        machine("sglang", engine={"registered": False}),
        "factory",
        Verdict.FAIL,
        "does not take kvwarehouse_connectors.sglang.WarehouseStorage",
    ),
    "a machine without gpus": (
        "sglang",
        machine("sglang", engine={"device": "cpu"}),
        "device",
        Verdict.FAIL,
        "GPUs alone",
    ),
    "no module path": (
        "sglang",
        extra(module_path=None),
        "configuration",
        Verdict.FAIL,
        "module_path",
    ),
    "no backend name": (
        "sglang",
        extra(backend_name=None),
        "configuration",
        Verdict.FAIL,
        "has no backend_name",
    ),
    "another class": (
        "sglang",
        extra(class_name="HiCacheFile"),
        "configuration",
        Verdict.FAIL,
        "'HiCacheFile' is another backend",
    ),
    "pages copied twice": (
        "sglang",
        extra(interface_v1=None),
        "interface",
        Verdict.WARN,
        '"interface_v1": 1',
    ),
    "heads cut without the interface": (
        "sglang",
        extra(interface_v1=0, tp_lcm_size=4),
        "interface",
        Verdict.WARN,
        "tp_lcm_size = 4",
    ),
    "a misspelt setting": (
        "sglang",
        extra(kvwarehouse__timeout=2),
        "settings",
        Verdict.FAIL,
        "kvwarehouse.timeout = 2 is unknown",
    ),
    "a bad mode": (
        "sglang",
        extra(kvwarehouse__mode="readonly"),
        "settings",
        Verdict.FAIL,
        "read_write, read_only, write_only",
    ),
    "an extra config that cannot be read": (
        "sglang",
        replace(machine("sglang"), config=ConfigFacts(given=True, error="not JSON: line 1")),
        "configuration",
        Verdict.FAIL,
        "not JSON: line 1",
    ),
    "pages that fit no slab": (
        "sglang",
        machine("sglang", page={"page_bytes": 300 << 20}),
        "pages",
        Verdict.FAIL,
        "--page-size",
    ),
    "no tensorrt-llm": (
        "trtllm",
        machine("trtllm", software={"engine_distributions": ()}, engine=ABSENT),
        "tensorrt_llm",
        Verdict.FAIL,
        "pip install 'kvwarehouse'",
    ),
    "an older tensorrt-llm": (
        "trtllm",
        machine("trtllm", engine={"version": "0.21.0"}),
        "tensorrt_llm",
        Verdict.FAIL,
        "TensorRT-LLM 1.0 or newer",
    ),
    "a newer tensorrt-llm": (
        "trtllm",
        machine("trtllm", engine={"version": "1.5.0rc2"}),
        "tensorrt_llm",
        Verdict.WARN,
        "been written for 1.4 and nothing newer",
    ),
    "a revision that asks for more": (
        "trtllm",
        machine("trtllm", engine={"connector_error": "UsageError: asks connectors for prefetch"}),
        "connector",
        Verdict.FAIL,
        "asks connectors for prefetch",
    ),
    "tensorrt-llm without gpus": (
        "trtllm",
        machine("trtllm", engine={"device": "cpu"}),
        "device",
        Verdict.FAIL,
        "no GPU",
    ),
    "no connector": (
        "trtllm",
        yaml(kv_connector_config=None),
        "configuration",
        Verdict.FAIL,
        "without a connector",
    ),
    "another worker": (
        "trtllm",
        yaml(kv_connector_config={**NAMED, "connector_worker_class": "MyWorker"}),
        "configuration",
        Verdict.FAIL,
        "'MyWorker', not WarehouseWorker",
    ),
    "pipeline stages": (
        "trtllm",
        yaml(pipeline_parallel_size=2),
        "engine",
        Verdict.FAIL,
        "pipeline_parallel_size = 2",
    ),
    "windows on one pool tensor": (
        "trtllm",
        yaml(
            kv_cache_config={"enable_partial_reuse": False, "max_attention_window": [512]},
            max_seq_len=4096,
        ),
        "engine",
        Verdict.FAIL,
        "use_kv_cache_manager_v2",
    ),
    "an argument of another kind": (
        "trtllm",
        yaml(tensor_parallel_size="many"),
        "engine",
        Verdict.FAIL,
        "many",
    ),
    "blocks reused in part": (
        "trtllm",
        yaml(kv_cache_config={}),
        "partial reuse",
        Verdict.WARN,
        "enable_partial_reuse: false",
    ),
    "dummy weights": (
        "trtllm",
        yaml(load_format="dummy"),
        "weights",
        Verdict.FAIL,
        "TLLM_KVW_WEIGHTS=NAME",
    ),
    "a misspelt variable": (
        "trtllm",
        yaml({"TLLM_KVW_ADRESS": "x"}),
        "settings",
        Verdict.FAIL,
        "TLLM_KVW_ADRESS = 'x' is unknown",
    ),
    "two addresses": (
        "trtllm",
        yaml({"TLLM_KVW_ADDRESS": "unix:///run/another.sock"}),
        "settings",
        Verdict.FAIL,
        "differs from server_url",
    ),
    "an address of another host": (
        "trtllm",
        yaml(kv_connector_config={**NAMED, "server_url": "gpu-7:7070"}),
        "settings",
        Verdict.FAIL,
        "gpu-7:7070",
    ),
    "a part that is none": (
        "trtllm",
        yaml(kv_connector_config="kvwarehouse"),
        "settings",
        Verdict.FAIL,
        "is not names with values",
    ),
    "a variable that the ranks do not get": (
        "trtllm",
        without_server_url(KVW_ADDRESS="unix:///run/kvw/kvw.sock"),
        "variables",
        Verdict.WARN,
        "TLLM_KVW_ADDRESS",
    ),
    "little memory for its staging": (
        "trtllm",
        machine("trtllm", host={"available_bytes": 300 << 20}),
        "host memory",
        Verdict.WARN,
        "256 MiB",
    ),
    "blocks that fit no slab": (
        "trtllm",
        machine("trtllm", page={"page_bytes": 300 << 20}),
        "pages",
        Verdict.FAIL,
        "tokens_per_block",
    ),
}
ALSO = {"a part that is none": {"configuration"}}


def findings(name: str, facts: Facts) -> dict[str, Finding]:
    found = engine_of(name).findings_of(facts)
    assert len({one.check for one in found}) == len(found), "each check once"
    return {one.check: one for one in found}


def bad(found: Mapping[str, Finding]) -> set[str]:
    return {check for check, one in found.items() if one.verdict in (Verdict.WARN, Verdict.FAIL)}


@pytest.mark.parametrize("name", CONFIGS)
def test_healthy_machine_has_nothing_to_complain_of_but_what_was_never_run(name: str) -> None:
    found = findings(name, machine(name))
    assert bad(found) == SAID[name]
    assert {one.verdict for one in found.values()} == {Verdict.OK, Verdict.WARN}
    assert healthy(found.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_with_what_to_do(fault: str) -> None:
    name, facts, check, verdict, words = FAULTS[fault]
    found = findings(name, facts)[check]
    assert found.verdict is verdict
    assert words in f"{found.what} {found.fix}"
    assert found.fix


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_else_is_complained_of_when_one_thing_is_wrong(fault: str) -> None:
    name, facts, check, verdict, _ = FAULTS[fault]
    found = findings(name, facts)
    assert bad(found) - SAID[name] - ALSO.get(fault, set()) == {check} - SAID[name]
    assert healthy(found.values()) == (verdict is Verdict.WARN)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_not_given_is_skipped_with_what_to_give(name: str) -> None:
    facts = replace(machine(name), config=ConfigFacts(), page=PageFacts())
    found = findings(name, facts)
    for check, option in (("configuration", "--config"), ("pages", "--model")):
        assert found[check].verdict is Verdict.SKIP
        assert option in found[check].what


def test_variable_for_the_ranks_is_right_beside_the_one_that_they_do_not_get() -> None:
    address = f"unix://{SOCKET}"
    facts = without_server_url(KVW_ADDRESS=address, TLLM_KVW_ADDRESS=address)
    assert bad(findings("trtllm", facts)) == SAID["trtllm"]


def test_windows_are_served_where_block_tables_tell_of_them() -> None:
    cache = {"enable_partial_reuse": False, "max_attention_window": [512]}
    facts = yaml(kv_cache_config={**cache, "use_kv_cache_manager_v2": True}, max_seq_len=4096)
    assert findings("trtllm", facts)["engine"].verdict is Verdict.OK


def test_named_dummy_weights_are_right() -> None:
    facts = yaml({"TLLM_KVW_WEIGHTS": "noise-1"}, load_format="dummy")
    assert findings("trtllm", facts)["weights"].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("cache", "tokens"), [({}, 32), ({"tokens_per_block": 64}, 64), ({"tokens_per_block": "x"}, 0)]
)
def test_tokens_of_a_block_are_those_of_the_configuration(
    cache: dict[str, Any], tokens: int
) -> None:
    assert engine_of("trtllm").page_tokens_of({"kv_cache_config": cache}) == tokens
    assert engine_of("sglang").page_tokens_of(EXTRA) == 0

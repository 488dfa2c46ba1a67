"""What vLLM and the warehouse need of each other. Judges facts; looks at nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvwarehouse import format_size as size
from kvwarehouse.host import Finding, fail, ok, skip, warn
from kvwarehouse_connectors.doctor.facts import Facts, SettingsFacts
from kvwarehouse_connectors.doctor.host import check_host
from kvwarehouse_connectors.doctor.pages import check_pages
from kvwarehouse_connectors.doctor.probe_vllm import CONNECTOR
from kvwarehouse_connectors.doctor.software import (
    PIP,
    Served,
    check_connector,
    check_packages,
    check_settings,
    check_staging,
    check_torch,
    check_version,
    device_shown,
    part_of,
    settings_facts,
)
from kvwarehouse_connectors.doctor.warehouse import check_warehouse
from kvwarehouse_connectors.vllm.settings import ROLES, read_settings
from kvwarehouse_connectors.vllm.staging import MOST_BYTES, usual_bytes

LEAST = (0, 32)
"""The first version served."""
RUN = (0, 32)
"""The last version that the connector's tests have run on."""

PLUGIN = "kvwarehouse"
_OBJECT = "kvwarehouse_connectors.vllm.plugin:register"
# Not imported: without vLLM the connector's modules cannot be.
_BY_PATH = '"kv_connector_module_path": "kvwarehouse_connectors.vllm.connector"'
_UNKNOWN_MEMORY = 1 << 60
_HASHES_AS_THEY_ARE = ("sha256", "sha256_cbor")


SERVED = Served(
    title="vLLM",
    module="vllm",
    least=LEAST,
    newest=RUN,
    was_run=True,
    install="kvwarehouse[vllm]",
    page="docs/vllm.md",
    page_tokens=16,
    cpu_page_tokens=128,
    page_option="--block-size",
    config_option="--kv-transfer-config",
    plugin_group="vllm.general_plugins",
)


def settings_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> SettingsFacts:
    role = str(config.get("kv_role", "kv_both"))
    return settings_facts(lambda: read_settings(part_of(config, "kv_connector_extra_config"), role))


def page_tokens_of(config: Mapping[str, Any]) -> int:
    """It is an option of its own."""
    return 0


def findings_of(facts: Facts) -> list[Finding]:
    """All checks, in the order in which one would mend them."""
    return [
        *_software(facts),
        *check_settings(facts, SERVED),
        *_configuration(facts),
        *_command_line(facts),
        *_engine(facts),
        *check_host(facts),
        _host_memory(facts),
        _step(facts),
        *check_warehouse(facts),
        *check_pages(facts, SERVED.page_option),
    ]


def _software(facts: Facts) -> Iterator[Finding]:
    yield check_version(facts, SERVED)
    yield _command(facts)
    yield check_torch(facts, SERVED)
    yield check_packages(facts)
    yield _plugin(facts)
    yield check_connector(facts, SERVED)
    yield _device(facts)


def _configuration(facts: Facts) -> Iterator[Finding]:
    """What --kv-transfer-config says besides the connector's settings."""
    config, check = facts.config.values, "configuration"
    if not facts.config.given or facts.config.error:
        return
    if config.get("kv_connector") != CONNECTOR:
        yield fail(
            check,
            f"kv_connector = {config.get('kv_connector')!r} is another connector",
            f'"kv_connector": "{CONNECTOR}"',
        )
    elif config.get("kv_role") not in ROLES:
        yield fail(
            check,
            f"kv_role = {config.get('kv_role')!r}: vLLM asks for one of {', '.join(ROLES)}",
            '"kv_role": "kv_both"',
        )
    elif config.get("kv_load_failure_policy") != "recompute":
        yield warn(
            check,
            "without a kv_load_failure_policy of recompute vLLM fails a request when a block does"
            " not come",
            '"kv_load_failure_policy": "recompute"',
        )
    else:
        yield ok(
            check, f"{CONNECTOR} as {config['kv_role']}; a block that does not come is computed"
        )


def _command_line(facts: Facts) -> Iterator[Finding]:
    """The arguments of `vllm serve`, as vLLM and the connector read them."""
    check, found = "vllm serve", facts.engine
    if not facts.command:
        yield skip(check, "no command line was given: after -- its arguments are judged")
        return
    if not found.version:
        yield skip(check, "vLLM was not imported")
    elif found.command_error:
        yield fail(
            check, found.command_error, "change its arguments; docs/vllm.md says what is served"
        )
    elif not found.command_block_tokens:
        yield skip(check, "vLLM did not come to read its arguments")
    else:
        yield ok(
            check, f"such an engine is served, in blocks of {found.command_block_tokens} tokens"
        )


def _host_memory(facts: Facts) -> Finding:
    most = _staging_bytes(facts, facts.host.available_bytes)
    return check_staging(replace(facts, settings=replace(facts.settings, staging_bytes=most)))


def _step(facts: Facts) -> Finding:
    """Whether a worker can store what one step fills."""
    check, step = "store of a step", facts.page.step_bytes
    if facts.settings.error or facts.settings.mode == "read_only":
        return skip(check, "the settings cannot be read, or nothing is stored")
    if not step:
        return skip(check, "--model, and the engine's command line after --, say what a step fills")
    there = _staging_bytes(facts, _UNKNOWN_MEMORY)
    shown = (
        f"a step of {facts.engine.command_step_tokens:,} tokens fills about {size(step)} on each"
        f" rank, and half of staging_bytes, {size(there)}, is stored of it"
    )
    if there < 2 * step:
        return warn(
            check,
            f"{shown}; the rest is stored later, or dropped if the request ends before",
            f'"kvwarehouse.staging_bytes": "{-(-2 * step >> 20)}MiB", or fewer tokens a step'
            " (--max-num-batched-tokens)",
        )
    return ok(check, f"{shown} at most")


def _staging_bytes(facts: Facts, memory_bytes: int) -> int:
    """Of each rank; memory_bytes: what there is of the memory."""
    needed = 2 * facts.page.step_bytes or MOST_BYTES
    return facts.settings.staging_bytes or usual_bytes(needed, memory_bytes)


def _engine(facts: Facts) -> Iterator[Finding]:
    yield _hashes(facts)
    yield _layout(facts)
    yield from _allocator(facts)


def _command(facts: Facts) -> Finding:
    check = "vllm command"
    if not facts.engine.version:
        return skip(check, "vLLM was not imported")
    if "vllm" in facts.software.versions:
        return ok(check, "`vllm serve` finds its package")
    return warn(
        check,
        f"no distribution is called vllm ({', '.join(facts.software.engine_distributions)}):"
        " `vllm serve` asks for one and ends",
        "use `python -m vllm.entrypoints.openai.api_server --model MODEL ...`, or see docs/vllm.md",
    )


def _plugin(facts: Facts) -> Finding:
    check = "plugin"
    allowed = facts.environment.get("VLLM_PLUGINS")
    if (PLUGIN, _OBJECT) not in facts.software.plugins:
        return fail(
            check,
            "vLLM's entry points (vllm.general_plugins) do not name the connector",
            f"install kvwarehouse anew {PIP}; or give {_BY_PATH} in --kv-transfer-config",
        )
    if allowed is not None and PLUGIN not in allowed.split(","):
        names = ",".join(filter(None, [*allowed.split(","), PLUGIN]))
        return fail(
            check,
            f"VLLM_PLUGINS={allowed!r} leaves it out",
            f"VLLM_PLUGINS={names}, or unset it; or give {_BY_PATH} in --kv-transfer-config",
        )
    if not facts.engine.version:
        return skip(check, "the entry point is there; vLLM was not imported")
    if not facts.engine.registered:
        return fail(
            check,
            "vLLM loaded its plugins and does not know WarehouseConnector",
            f"report this with vLLM's version; meanwhile give {_BY_PATH} in --kv-transfer-config",
        )
    return ok(check, 'vLLM knows "WarehouseConnector" by name')


def _device(facts: Facts) -> Finding:
    check, device = "device", facts.engine.device
    shown = device_shown(facts)
    if not device:
        return skip(check, "vLLM was not imported")
    if device == "cpu":
        return ok(check, f"{shown}: blocks are copied straight from and to shared memory")
    return warn(
        check,
        f"{shown}: pages go straight between CUDA's devices and shared memory, else through host"
        " memory (docs/gpu.md); neither way has been run on a device",
        "compare some answers with and without the connector before you rely on it",
    )


def _hashes(facts: Facts) -> Finding:
    check, algorithm = "block hashes", facts.engine.hash_algorithm
    if not algorithm:
        return skip(check, "vLLM was not imported")
    seed = facts.environment.get("PYTHONHASHSEED")
    if algorithm not in _HASHES_AS_THEY_ARE:
        how = "not kept: the connector makes SHA-256 keys of its own from the tokens"
    elif seed is None:
        how = "the same in every process"
    else:
        how = f"made from PYTHONHASHSEED={seed}: only engines that have it too share KV"
    return ok(check, f"{algorithm} by default, {how}")


def _layout(facts: Facts) -> Finding:
    check = "layout"
    forced = facts.environment.get("VLLM_KV_CACHE_LAYOUT")
    if forced:
        return ok(check, f"VLLM_KV_CACHE_LAYOUT={forced}: only engines that have it too share KV")
    return ok(check, "vLLM's own choice; engines share KV where it is the same")


def _allocator(facts: Facts) -> Iterator[Finding]:
    """vLLM refuses every connector with such memory, on CUDA."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = facts.environment.get(name, "")
        if facts.engine.device == "cuda" and "expandable_segments:True" in value:
            yield fail(
                "allocator",
                f"{name}={value}: vLLM refuses connectors with expandable segments",
                f"take expandable_segments:True out of {name}",
            )

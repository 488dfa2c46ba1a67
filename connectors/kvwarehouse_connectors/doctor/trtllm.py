"""What TensorRT-LLM and the warehouse need of each other. Judges facts; looks at nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from kvwarehouse.host import Finding, fail, ok, skip, warn
from kvwarehouse_connectors.doctor.facts import Facts, SettingsFacts
from kvwarehouse_connectors.doctor.host import check_host
from kvwarehouse_connectors.doctor.pages import check_pages
from kvwarehouse_connectors.doctor.probe_trtllm import MODULE, SCHEDULER, WORKER
from kvwarehouse_connectors.doctor.software import (
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
from kvwarehouse_connectors.trtllm import arguments
from kvwarehouse_connectors.trtllm.settings import PREFIX, Settings, read_settings

LEAST = (1, 0)
"""The first version whose interface the connector knows."""
NEWEST = (1, 4)
"""The last version whose sources it was written from."""

SERVED = Served(
    title="TensorRT-LLM",
    module="tensorrt_llm",
    least=LEAST,
    newest=NEWEST,
    was_run=False,
    install="kvwarehouse",
    page="docs/trtllm.md",
    page_tokens=32,
    page_option="kv_cache_config.tokens_per_block",
    config_option="--extra_llm_api_options",
)

_CONFIG = "kv_connector_config"
_PARTS = (_CONFIG, "kv_cache_config")
_OURS = {
    "connector_module": MODULE,
    "connector_scheduler_class": SCHEDULER,
    "connector_worker_class": WORKER,
}


def settings_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> SettingsFacts:
    def read() -> Settings:
        for name in _PARTS:
            part_of(config, name)  # raises where it is something else
        return read_settings(environment, arguments.server_url(_llm_args(config)))

    return settings_facts(read)


def page_tokens_of(config: Mapping[str, Any]) -> int:
    try:
        return arguments.tokens_per_block(_llm_args(config))
    except (TypeError, ValueError):
        return 0  # a finding says so


def findings_of(facts: Facts) -> list[Finding]:
    """All checks, in the order in which one would mend them."""
    return [
        *_software(facts),
        *check_settings(facts, SERVED),
        *_configuration(facts),
        *_address(facts),
        *check_host(facts),
        check_staging(facts),
        *check_warehouse(facts),
        *check_pages(facts, SERVED.page_option),
    ]


def _software(facts: Facts) -> Iterator[Finding]:
    yield check_version(facts, SERVED)
    yield check_torch(facts, SERVED)
    yield check_packages(facts)
    yield check_connector(facts, SERVED)
    yield _device(facts)


def _configuration(facts: Facts) -> Iterator[Finding]:
    config = facts.config.values
    if not facts.config.given or facts.config.error:
        return
    yield _connector_named(config)
    yield _engine_served(config)
    yield _partial_reuse(config)
    yield _weights(facts)


def _connector_named(config: Mapping[str, Any]) -> Finding:
    check, named = "configuration", config.get(_CONFIG)
    fix = f"{_CONFIG}: {', '.join(f'{name}: {value}' for name, value in _OURS.items())}"
    if not isinstance(named, Mapping):
        return fail(check, f"has no {_CONFIG}: the engine starts without a connector", fix)
    for name, value in _OURS.items():
        if named.get(name) != value:
            return fail(check, f"{_CONFIG}.{name} = {named.get(name)!r}, not {value}", fix)
    return ok(check, f"{_CONFIG} names {MODULE}")


def _engine_served(config: Mapping[str, Any]) -> Finding:
    """By the rules that the connector itself goes by."""
    check, llm_args = "engine", _llm_args(config)
    try:
        problem = arguments.engine_problem(llm_args)
        if not problem and not getattr(llm_args.kv_cache_config, "use_kv_cache_manager_v2", False):
            problem = arguments.pool_problem(llm_args)
    except (TypeError, ValueError) as error:
        return fail(
            check, f"its arguments cannot be read: {error}", "give each a value of its kind"
        )
    if problem:
        return fail(check, f"it {problem}", f"what is served, {SERVED.page} says")
    return ok(check, "nothing in its arguments that the connector refuses")


def _partial_reuse(config: Mapping[str, Any]) -> Finding:
    check = "partial reuse"
    cache = _llm_args(config).kv_cache_config
    if getattr(cache, "enable_partial_reuse", True):
        return warn(
            check,
            "the engine may have a part of a block in its own cache: such prompts are computed"
            " from there on, and never loaded",
            "kv_cache_config: enable_partial_reuse: false",
        )
    return ok(check, "off: prompts go on at whole blocks")


def _weights(facts: Facts) -> Finding:
    check = "weights"
    if arguments.loads_no_weights(_llm_args(facts.config.values)) and not facts.environment.get(
        f"{PREFIX}WEIGHTS"
    ):
        return fail(
            check,
            "load_format is dummy: such weights are in no file, and the engine would not start",
            f"{PREFIX}WEIGHTS=NAME, another whenever they change",
        )
    return ok(check, "told apart by their files, or by the name that is given for them")


def _address(facts: Facts) -> Iterator[Finding]:
    """The engine's other processes do not get every variable."""
    if facts.settings.error or facts.config.error or not facts.environment.get("KVW_ADDRESS"):
        return
    config = facts.config.values
    if arguments.server_url(_llm_args(config)) or facts.environment.get(f"{PREFIX}ADDRESS"):
        return
    yield warn(
        "variables",
        "KVW_ADDRESS alone names the daemon: TensorRT-LLM passes only variables that begin with"
        " TLLM on to its ranks, which then look for another one",
        f"{_CONFIG}: server_url: {facts.settings.address}, or {PREFIX}ADDRESS",
    )


def _device(facts: Facts) -> Finding:
    check, device = "device", facts.engine.device
    shown = device_shown(facts)
    if not device:
        return skip(check, "torch was not imported")
    if device == "cpu":
        return fail(
            check,
            "torch sees no GPU, and TensorRT-LLM needs one",
            "run the doctor where the engine runs, with its devices",
        )
    return ok(check, f"{shown}: blocks go through host memory on streams of their own")


def _llm_args(config: Mapping[str, Any]) -> SimpleNamespace:
    """As the connector is given them: each part of the configuration by its name. A part that is
    something else is left out; settings_of refuses it."""
    found = {name: config.get(name) for name in _PARTS}
    parts = {
        name: SimpleNamespace(**(part if isinstance(part, Mapping) else {}))
        for name, part in found.items()
    }
    return SimpleNamespace(**{**config, **parts})

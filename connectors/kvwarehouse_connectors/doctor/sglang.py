"""What SGLang and the warehouse need of each other. Judges facts; looks at nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvwarehouse.host import Finding, fail, ok, skip, warn
from kvwarehouse_connectors.doctor.facts import Facts, SettingsFacts
from kvwarehouse_connectors.doctor.host import check_host
from kvwarehouse_connectors.doctor.pages import check_pages
from kvwarehouse_connectors.doctor.probe_sglang import CLASS, MODULE
from kvwarehouse_connectors.doctor.software import (
    Served,
    check_connector,
    check_packages,
    check_settings,
    check_torch,
    check_version,
    device_shown,
    settings_facts,
)
from kvwarehouse_connectors.doctor.warehouse import check_warehouse
from kvwarehouse_connectors.sglang.settings import WHERE, read_settings

LEAST = (0, 5, 23)
"""The first version served."""
RUN = (0, 5, 23)
"""The last version that the connector's tests have run on."""

SERVED = Served(
    title="SGLang",
    module="sglang",
    least=LEAST,
    newest=RUN,
    was_run=True,
    install="kvwarehouse[sglang]",
    page="docs/sglang.md",
    page_tokens=1,
    page_option="--page-size",
    config_option=f"--{WHERE}",
)

# Names that SGLang's factory asks for, and what they have to be.
_OURS = {"module_path": MODULE, "class_name": CLASS}


def settings_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> SettingsFacts:
    return settings_facts(lambda: read_settings(config))


def page_tokens_of(config: Mapping[str, Any]) -> int:
    """It is an option of its own."""
    return 0


def findings_of(facts: Facts) -> list[Finding]:
    """All checks, in the order in which one would mend them."""
    return [
        *_software(facts),
        *check_settings(facts, SERVED),
        *_configuration(facts),
        *check_host(facts),
        *check_warehouse(facts),
        *check_pages(facts, SERVED.page_option),
    ]


def _software(facts: Facts) -> Iterator[Finding]:
    yield check_version(facts, SERVED)
    yield check_torch(facts, SERVED)
    yield check_packages(facts)
    yield check_connector(facts, SERVED)
    yield _plugin(facts)
    yield _device(facts)


def _configuration(facts: Facts) -> Iterator[Finding]:
    config = facts.config.values
    if not facts.config.given or facts.config.error:
        return
    yield _backend(config)
    yield _interface(config)


def _backend(config: Mapping[str, Any]) -> Finding:
    missing = [name for name in ("backend_name", *_OURS) if not config.get(name)]
    wanted = ", ".join(f'"{name}": "{value}"' for name, value in _OURS.items())
    fix = f'"backend_name": "kvwarehouse", {wanted}'
    if missing:
        told = f"has no {', '.join(missing)}: SGLang does not find a `dynamic` backend without"
        return fail("configuration", told, fix)
    for name, value in _OURS.items():
        if config[name] != value:
            return fail("configuration", f"{name} = {config[name]!r} is another backend", fix)
    return ok("configuration", f"--hicache-storage-backend dynamic finds {MODULE}.{CLASS}")


def _interface(config: Mapping[str, Any]) -> Finding:
    check = "interface"
    if config.get("interface_v1"):
        return ok(check, "pages are loaded and stored where they lie in the host pool")
    told = 'without "interface_v1": 1 SGLang copies each page twice on its way'
    cut = int(config.get("tp_lcm_size") or 0)
    if cut > 1:
        told += f"; with tp_lcm_size = {cut} above the TP size the engine does not start"
    return warn(check, told, '"interface_v1": 1')


def _plugin(facts: Facts) -> Finding:
    check = "factory"
    if not facts.engine.version or facts.engine.connector_error or facts.engine.crash:
        return skip(check, "the connector was not imported with SGLang")
    if not facts.engine.registered:
        return fail(
            check,
            f"SGLang's factory of storage backends does not take {MODULE}.{CLASS}",
            f"report this with SGLang's version; {SERVED.page} names one that does",
        )
    return ok(check, "SGLang's factory of storage backends takes the connector")


def _device(facts: Facts) -> Finding:
    check, device = "device", facts.engine.device
    shown = device_shown(facts)
    if not device:
        return skip(check, "SGLang was not imported, or does not say")
    if device == "cpu":
        return fail(
            check,
            "SGLang sees no GPU: HiCache's copies between devices and host memory exist for GPUs"
            " alone",
            "run the doctor where the engine runs, with its devices",
        )
    return warn(
        check,
        f"{shown}: tested on SGLang's real controllers and host pools, and never in a running"
        " server or on a device",
        "compare some answers with and without the connector before you rely on it",
    )

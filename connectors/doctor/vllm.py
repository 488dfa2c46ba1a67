"""What vLLM and the warehouse need of each other. Judges facts; looks at nothing itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvwarehouse_connectors.doctor.facts import Facts
from kvwarehouse_connectors.doctor.findings import Finding, fail, ok, skip, warn
from kvwarehouse_connectors.doctor.host import check_host
from kvwarehouse_connectors.doctor.warehouse import check_warehouse

LEAST = (0, 32)
"""The first version served."""
RUN = (0, 32)
"""The last version that the connector's tests have run on."""

PLUGIN = "kvwarehouse"
_OBJECT = "kvwarehouse_connectors.vllm.plugin:register"
# Not imported: without vLLM the connector's modules cannot be.
_BY_PATH = '"kv_connector_module_path": "kvwarehouse_connectors.vllm.connector"'
_HASHES_AS_THEY_ARE = ("sha256", "sha256_cbor")
_PIP = "with this environment's pip"


def findings_of(facts: Facts) -> list[Finding]:
    """All checks, in the order in which one would mend them."""
    return [*_software(facts), *_settings(facts), *check_host(facts), *check_warehouse(facts)]


def _software(facts: Facts) -> Iterator[Finding]:
    yield _vllm(facts)
    yield _command(facts)
    yield _torch(facts)
    yield _packages(facts)
    yield _plugin(facts)
    yield _connector(facts)
    yield _device(facts)


def _settings(facts: Facts) -> Iterator[Finding]:
    yield _hashes(facts)
    yield _layout(facts)
    yield from _allocator(facts)


def _vllm(facts: Facts) -> Finding:
    engine, software, check = facts.engine, facts.software, "vllm"
    if not engine.version:
        what = engine.engine_error or engine.crash or "it told no version"
        fix = f"install vLLM {_dotted(LEAST)} or newer, or mend its installation: {software.python}"
        if not software.engine_distributions:
            what = f"not installed for {software.python}"
            fix = (
                "run the doctor in the engine's environment, and install kvwarehouse there:"
                " pip install 'kvwarehouse[vllm]'"
            )
        return fail(check, what, fix)
    shown = f"{engine.version}, of {' and '.join(software.engine_distributions) or 'a source tree'}"
    version = _version(engine.version)
    if version is None:
        return warn(check, f"{shown}: no version to compare", "make sure it is a recent one")
    if version < LEAST:
        return fail(
            check,
            f"{shown}: its interface for connectors is an older one",
            f"upgrade vLLM to {_dotted(LEAST)} or newer",
        )
    if version > RUN:
        return warn(
            check,
            f"{shown}: the connector has been run on {_dotted(RUN)} and nothing newer",
            "upgrade kvwarehouse, or compare an answer with and without the connector once",
        )
    return ok(check, shown)


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


def _torch(facts: Facts) -> Finding:
    if facts.engine.torch:
        return ok("torch", facts.engine.torch)
    what = facts.engine.torch_error or facts.engine.crash or "not imported"
    return fail("torch", what, "install the version that this vLLM asks for; pip tells which")


def _packages(facts: Facts) -> Finding:
    software, check = facts.software, "packages"
    if software.unmet:
        wanted = " ".join(f"'{need.partition(' ')[0]}'" for need in software.unmet)
        return fail(check, "; ".join(software.unmet), f"{_PIP}: pip install {wanted}")
    shown = ", ".join(
        f"{name} {software.versions[name]}"
        for name in ("kvwarehouse", "grpcio", "protobuf", "numpy")
        if name in software.versions
    )
    return ok(check, shown)


def _plugin(facts: Facts) -> Finding:
    check = "plugin"
    allowed = facts.environment.get("VLLM_PLUGINS")
    if (PLUGIN, _OBJECT) not in facts.software.plugins:
        return fail(
            check,
            "vLLM's entry points (vllm.general_plugins) do not name the connector",
            f"install kvwarehouse anew {_PIP}; or give {_BY_PATH} in --kv-transfer-config",
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


def _connector(facts: Facts) -> Finding:
    check = "connector"
    if not facts.engine.version:
        return skip(check, "vLLM was not imported")
    if facts.engine.connector_error:
        return fail(
            check,
            facts.engine.connector_error,
            "upgrade kvwarehouse, or take the version of vLLM that docs/vllm.md names",
        )
    if facts.engine.crash:
        return fail(check, facts.engine.crash, "mend the installation of vLLM first")
    return ok(check, "its class loads and has every hook that vLLM asks for")


def _device(facts: Facts) -> Finding:
    check, device = "device", facts.engine.device
    shown = " ".join(dict.fromkeys(filter(None, (device, facts.engine.device_name))))
    if not device:
        return skip(check, "vLLM was not imported")
    if device == "cpu":
        return ok(check, f"{shown}: blocks are copied straight from and to shared memory")
    return warn(
        check,
        f"{shown}: blocks go through host memory on streams of their own; that way is written and"
        " tested on CPU tensors, and has not been run on a device",
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


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)

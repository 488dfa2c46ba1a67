"""Judges what is the same for every engine: its package and version, torch, ours, the settings.

Judges facts; looks at nothing itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import kvwarehouse as kvw
from kvwarehouse import format_size as size
from kvwarehouse.host import Finding, fail, ok, skip, warn
from kvwarehouse_connectors.doctor.facts import Facts, SettingsFacts

PIP = "with this environment's pip"

_MODES = {
    "read_write": "loads and stores",
    "read_only": "loads, stores nothing",
    "write_only": "stores, loads nothing",
}


@dataclass(frozen=True)
class Served:
    """An engine, and which of its versions the connector serves."""

    title: str
    module: str
    """Of the engine's package; the check of its version has this name."""
    least: tuple[int, ...]
    """The first version served."""
    newest: tuple[int, ...]
    """The last version that the connector's tests have run on; else, that it was written for."""
    was_run: bool
    """Whether its tests have run with the engine."""
    install: str
    """What pip is asked for."""
    page: str
    """Of the documentation."""
    page_tokens: int
    """The engine's own default."""
    page_option: str
    """Where the engine has the tokens of a page."""
    config_option: str
    """Where the engine has what --config is given."""
    plugin_group: str = ""
    """Of entry points by which the engine finds plugins."""
    cpu_page_tokens: int = 0
    """The engine's default on a CPU, where that is another; else 0."""

    def page_tokens_on(self, device: str) -> int:
        """device: as EngineFacts has it."""
        return (device == "cpu" and self.cpu_page_tokens) or self.page_tokens


def check_version(facts: Facts, served: Served) -> Finding:
    engine, software, check = facts.engine, facts.software, served.module
    least = f"{served.title} {dotted(served.least)} or newer"
    if not engine.version:
        what = engine.engine_error or engine.crash or "it told no version"
        fix = f"install {least}, or mend its installation: {software.python}"
        if not software.engine_distributions:
            what = f"not installed for {software.python}"
            fix = (
                "run the doctor in the engine's environment, and install kvwarehouse there:"
                f" pip install '{served.install}'"
            )
        return fail(check, what, fix)
    shown = f"{engine.version}, of {' and '.join(software.engine_distributions) or 'a source tree'}"
    version = _version(engine.version)
    if version is None:
        return warn(check, f"{shown}: no version to compare", "make sure it is a recent one")
    if version < served.least:
        what = f"{shown}: its interface for connectors is an older one"
        return fail(check, what, f"upgrade to {least}")
    return _not_run(check, shown, version, served) or ok(check, shown)


def _not_run(check: str, shown: str, version: tuple[int, ...], served: Served) -> Finding | None:
    compare = "compare an answer with and without the connector once"
    if version[: len(served.newest)] > served.newest:
        known = "been run on" if served.was_run else "been written for"
        what = f"{shown}: the connector has {known} {dotted(served.newest)} and nothing newer"
        return warn(check, what, f"upgrade kvwarehouse, or {compare}")
    if not served.was_run:
        what = f"{shown}: the connector was written from its sources, and has not been run with it"
        return warn(check, what, f"{compare}; {served.page} says what was run instead")
    return None


def check_torch(facts: Facts, served: Served) -> Finding:
    if facts.engine.torch:
        return ok("torch", facts.engine.torch)
    what = facts.engine.torch_error or facts.engine.crash or "not imported"
    return fail(
        "torch", what, f"install the version that this {served.title} asks for; pip tells which"
    )


def check_packages(facts: Facts) -> Finding:
    software, check = facts.software, "packages"
    if software.unmet:
        wanted = " ".join(f"'{need.partition(' ')[0]}'" for need in software.unmet)
        return fail(check, "; ".join(software.unmet), f"{PIP}: pip install {wanted}")
    shown = ", ".join(
        f"{name} {software.versions[name]}"
        for name in ("kvwarehouse", "grpcio", "protobuf", "numpy")
        if name in software.versions
    )
    return ok(check, shown)


def device_shown(facts: Facts) -> str:
    """Its kind, and its name where that says more."""
    engine = facts.engine
    return " ".join(dict.fromkeys(filter(None, (engine.device, engine.device_name))))


def check_connector(facts: Facts, served: Served) -> Finding:
    check = "connector"
    if not facts.engine.version:
        return skip(check, f"{served.title} was not imported")
    if facts.engine.connector_error:
        return fail(
            check,
            facts.engine.connector_error,
            f"upgrade kvwarehouse, or take the version of {served.title} that {served.page} names",
        )
    if facts.engine.crash:
        return fail(check, facts.engine.crash, f"mend the installation of {served.title} first")
    return ok(check, f"its class loads and has every hook that {served.title} asks for")


def check_settings(facts: Facts, served: Served) -> Iterator[Finding]:
    """Of the configuration that was given, whether it can be read; of it and the environment, what
    the connector makes of them."""
    config, settings = facts.config, facts.settings
    if config.error:
        yield fail(
            "configuration", config.error, f"give --config what {served.config_option} is given"
        )
        yield skip("settings", "the configuration cannot be read")
        return
    if not config.given:
        why = f"not given: --config with what {served.config_option} is given has it checked"
        yield skip("configuration", why)
    if settings.error:
        yield fail(
            "settings",
            settings.error,
            f"the engine would not start: {served.page} has every setting and what it may be",
        )
        return
    told = f"{settings.mode}: {_MODES[settings.mode]}; verify {settings.verify}"
    yield ok("settings", f"{told}; daemon at {settings.address}")


def check_staging(facts: Facts) -> Finding:
    """Of the memory that each rank takes besides the arena."""
    needed, there, check = facts.settings.staging_bytes, facts.host.available_bytes, "host memory"
    if facts.settings.error:
        return skip(check, "the settings cannot be read")
    if not there:
        return skip(check, "this system does not say how much is free")
    shown = f"{size(there)} are free; each rank takes {size(needed)} for pages on their way out"
    if needed > there // 2:
        return warn(check, shown, "a smaller staging_bytes, or more memory")
    return ok(check, shown)


def settings_facts(read: Callable[[], Any]) -> SettingsFacts:
    """read: the connector's own; what it raises is why the engine would not start."""
    try:
        settings = read()
    except kvw.WarehouseError as error:
        return SettingsFacts(error=str(error))
    return SettingsFacts(
        settings.address,
        settings.mode,
        settings.verify,
        getattr(settings, "staging_bytes", 0),
    )


def part_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The names and values under a name; none where there are none. Raises UsageError where
    something else is there."""
    part = config.get(name)
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise kvw.UsageError(f"{name} = {part!r} is not names with values", code="bad_setting")
    return part


def _version(text: str) -> tuple[int, ...] | None:
    found = re.match(r"\d+(\.\d+)+", text)
    return tuple(int(part) for part in found[0].split(".")) if found else None


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)

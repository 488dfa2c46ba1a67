"""The `kvwarehouse.*` settings that an engine's own configuration carries: how they are read and
checked, and those that connectors of all engines have.

Unknown names that begin with "kvwarehouse." are refused: a misspelt setting is not a default. Other
names are the engine's own. Stateless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import kvwarehouse as kvw

PREFIX = "kvwarehouse."

Check = Callable[[Any], Any]
"""The value as it is used. Raises ValueError with what is wrong about it, as what it does."""


def read_values(
    extra: Mapping[str, Any], checks: Mapping[str, Check], where: str
) -> dict[str, Any]:
    """The checked settings by their names without prefix. where: what `extra` is called, for
    messages. Raises UsageError (code "bad_setting") naming the setting."""
    values = {}
    for full_name, value in extra.items():
        if not full_name.startswith(PREFIX):
            continue
        name = full_name.removeprefix(PREFIX)
        if name not in checks:
            known = ", ".join(sorted(checks))
            raise bad_setting(where, name, value, f"is unknown; known are {known}")
        try:
            values[name] = checks[name](value)
        except ValueError as error:
            raise bad_setting(where, name, value, str(error)) from error
    return values


def bad_setting(where: str, name: str, value: Any, problem: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"{where}: {PREFIX}{name} = {value!r} {problem}",
        code="bad_setting",
        context={"setting": name, "value": value},
    )


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("is not text")
    return value


def one_of(*allowed: str) -> Check:
    def check(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"is not one of {', '.join(allowed)}")
        return str(value)

    return check


def number(least: float, most: float) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("is not a number")
        if not least <= value <= most:
            raise ValueError(f"is out of range; use {least:g} to {most:g}")
        return float(value)

    return check


def memory_size(name: str) -> Check:
    """Bytes, as a number or as text with a unit. name: as users know the setting."""

    def check(value: Any) -> int:
        size = kvw.parse_size(value, name=name)
        if not 1 << 20 <= size <= 1 << 40:
            raise ValueError("is out of range; use 1MiB to 1TiB")
        return size

    return check


def truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is not true or false")
    return value


MODES = ("read_write", "read_only", "write_only")


@dataclass(frozen=True)
class CommonSettings:
    """Beside the engine's own. A connector whose setting means something else says so again."""

    address: str = ""
    """The daemon of this host, unix:///path. Default: $KVW_ADDRESS, else this user's own socket."""
    mode: str = "read_write"
    """read_write, read_only (loads, stores nothing) or write_only."""
    verify: str = "always"
    """always: every page's digest; boundary: only of pages from NVMe or of an earlier daemon."""

    @property
    def loads(self) -> bool:
        return self.mode != "write_only"

    @property
    def stores(self) -> bool:
        return self.mode != "read_only"


COMMON_CHECKS: dict[str, Check] = {
    "address": text,
    "mode": one_of(*MODES),
    "verify": one_of("always", "boundary"),
    "salt": text,
}

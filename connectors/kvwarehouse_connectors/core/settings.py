"""What connectors of all engines can be told, wherever an engine lets its user say it."""

from __future__ import annotations

from dataclasses import dataclass

from kvwarehouse_connectors.core.setting_values import Check, one_of, text

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

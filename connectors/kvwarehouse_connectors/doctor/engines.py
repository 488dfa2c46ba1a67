"""The engines that the doctor knows: for each a module of its name here, with these parts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from kvwarehouse.host import Finding
from kvwarehouse_connectors.doctor.facts import Facts, SettingsFacts
from kvwarehouse_connectors.doctor.software import Served

ENGINES = ("vllm", "sglang", "trtllm")


class Engine(Protocol):
    """What such a module has. A module probe_NAME has the steps of the process that imports it."""

    SERVED: Served

    def settings_of(
        self, config: Mapping[str, Any], environment: Mapping[str, str]
    ) -> SettingsFacts:
        """As the connector itself reads them."""
        ...

    def page_tokens_of(self, config: Mapping[str, Any]) -> int:
        """Of a page, as far as the configuration says it; else 0."""
        ...

    def findings_of(self, facts: Facts) -> list[Finding]:
        """All checks, in the order in which one would mend them."""
        ...


def engine_of(name: str) -> Engine:
    return cast(Engine, import_module(f"kvwarehouse_connectors.doctor.{name}"))

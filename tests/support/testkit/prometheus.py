"""Prometheus as operators run it, for tests of deploy/: its programs, a process that scrapes
daemons and evaluates our rules, and the queries of our dashboards.

    with Prometheus(folder, {"busy": "127.0.0.1:9470"}) as prometheus:
        prometheus.query('up{instance="busy"}')

One owner; not thread-safe.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.process import Group, free_port

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
RULES: Final = DEPLOY / "prometheus" / "kvwarehouse.rules.yml"
DASHBOARDS: Final = sorted((DEPLOY / "grafana").glob("*.json"))
OTHERS: Final = {"up", "ALERTS"}
"""What is in rules and dashboards, and is Prometheus' own."""

_INTERVAL: Final = "500ms"
_NAME: Final = re.compile(r"\b(kvwarehouse_\w+|up|ALERTS)\b")
_SELECTOR: Final = re.compile(r"\b(?:kvwarehouse_\w+|up)(?:\{[^}]*\})?")

Series = list[tuple[dict[str, str], float]]


def program(name: str) -> str:
    """`prometheus` or `promtool`, installed or unpacked by `make setup`. Without, a test is
    skipped."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    places = os.pathsep.join([os.environ.get("PATH", ""), f"{home}/kvwarehouse/prometheus"])
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"needs {name}: Debian's package prometheus")
    return found


def names_in(expression: str) -> set[str]:
    """Of metrics; also of words in it that look like one, such as `up` as a label's value."""
    return set(_NAME.findall(expression))


def selectors_in(expression: str) -> list[str]:
    """What it selects, without ranges."""
    return _SELECTOR.findall(expression)


@dataclass(frozen=True)
class Target:
    """One query of a panel. `may_be_nan`: the panel says in words what no number can."""

    panel: str
    query: str
    may_be_nan: bool

    def of(self, instance: str) -> str:
        """As Grafana sends it when one daemon is chosen and all namespaces of Kubernetes are."""
        values = {
            "instance": instance,
            "namespace": ".*",
            "__rate_interval": "1m",
            "__range": "1h",
        }
        asked = re.sub(r"\$(\w+)", lambda found: values[found[1]], self.query)
        assert "$" not in asked, asked
        return asked


def targets(dashboard: Path) -> Iterator[Target]:
    for panel in json.loads(dashboard.read_text(encoding="utf-8"))["panels"]:
        mappings = panel.get("fieldConfig", {}).get("defaults", {}).get("mappings", [])
        words = any(each["options"].get("match") == "nan" for each in mappings)
        for target in panel.get("targets", ()):
            yield Target(panel["title"], target["expr"], words)


class Prometheus:
    def __init__(self, folder: Path, daemons: Mapping[str, str]) -> None:
        """`daemons`: the address of each one's /metrics, by the name that is its instance."""
        self._folder, self._daemons = folder, daemons
        self._program = program("prometheus")
        self._group: Group | None = None
        self._address = ""
        self._time: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    def query(self, expression: str) -> Series:
        """Labels and value of each series, now or when `stop_at` found what it waited for.
        AssertionError where Prometheus refuses it."""
        found = self._get("query", query=expression, **self._time)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def wait_for(self, expression: str) -> None:
        """Returns when it has a series."""
        eventually(lambda: self.query(expression), expression)

    def stop_at(self, expression: str) -> None:
        """As wait_for, and stays at that time: on a busy machine a scrape may come too late at any
        other, and its daemon then has no series for a moment."""

        def found() -> bool:
            result = self._get("query", query=expression)["result"]
            if not result:
                return False
            time_s = result[0]["value"][0]
            # What a scrape brings, or that it was too late, has the time of its beginning: all that
            # had begun by then is known once each daemon was scraped anew.
            self.wait_for(f"min(timestamp(up)) > {time_s}")
            then = {"time": str(time_s)}
            if self._get("query", query=expression, **then)["result"]:
                self._time = then
            return bool(self._time)

        eventually(found, expression)

    def rules(self) -> list[dict[str, Any]]:
        """What it says of each of our rules."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _start(self) -> None:
        configuration = {
            "global": {"scrape_interval": _INTERVAL, "scrape_timeout": _INTERVAL},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {
                    "job_name": "kvwarehouse",
                    "static_configs": [
                        {"targets": [address], "labels": {"instance": name}}
                        for name, address in self._daemons.items()
                    ],
                }
            ],
        }
        file = self._folder / "prometheus.yml"
        file.write_text(json.dumps(configuration), encoding="utf-8")  # JSON is YAML
        self._address = f"127.0.0.1:{free_port()}"
        command = [
            self._program,
            f"--config.file={file}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self._address}",
        ]
        self._group = Group(command, self._folder / "prometheus.log", dict(os.environ))
        self._group.start()
        eventually(self._answers, "Prometheus answers")

    def _answers(self) -> bool:
        assert self._group is not None
        assert self._group.running, self._group.tail()
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=DEADLINE_S):
                return True
        except OSError:  # nobody listens yet, or it reads its files
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        asked = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def _kill(self) -> None:
        if self._group is not None:
            self._group.kill()

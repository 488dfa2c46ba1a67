"""deploy/ without Prometheus: rules and dashboards name what a daemon exports, and the documents
say of each alert what its rule does."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvwarehouse.daemon.metrics import METRICS
from testkit.prometheus import DASHBOARDS, DEPLOY, OTHERS, RULES, names_in, targets

ROOT = DEPLOY.parent
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for rule in ALERTS},
    **{f"{path.stem}: {each.panel}": each.query for path in DASHBOARDS for each in targets(path)},
}
MATCHED = re.compile(r"(kvwarehouse_\w+)\{([^}]*)\}")
LABEL = re.compile(r'(\w+)\s*(?:=~|!=|=|!~)\s*"([^"]*)"')
OF_SCRAPES = {"instance", "namespace", "job"}


def values_of(name: str) -> set[str]:
    return set(METRICS[name].values)


def test_dashboards_and_rules_are_there() -> None:
    assert len(DASHBOARDS) == 2
    assert len(ALERTS) > 10


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_metric_of_an_expression_is_exported(where: str) -> None:
    named = names_in(EXPRESSIONS[where])
    assert named
    assert named - OTHERS <= set(METRICS)


def test_every_metric_of_text_beside_expressions_is_exported() -> None:
    for path in (RULES, *DASHBOARDS):
        text = path.read_text(encoding="utf-8")
        # Also in descriptions and variables; not the names of our own files and dashboards.
        named = set(re.findall(r"\bkvwarehouse_\w+", text))
        assert named
        assert named <= set(METRICS)


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_value_of_a_label_is_one_that_the_metric_has(where: str) -> None:
    for name, matchers in MATCHED.findall(EXPRESSIONS[where]):
        for label, values in LABEL.findall(matchers):
            if label in OF_SCRAPES:
                continue
            known = values_of(name)
            assert known, f"{name} has no label of known values"
            assert set(values.split("|")) <= known, f"{name}{{{label}}}"


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {name for path in DASHBOARDS for each in targets(path) for name in names_in(each.query)}
    assert set(METRICS) - shown == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_numbers_of_their_own_and_lie_beside_each_other(path: Path) -> None:
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(numbers) == len(set(numbers))
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_says_what_it_is_and_in_which_unit(path: Path) -> None:
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_but_that_of_alerts_asks_for_the_chosen_daemons(path: Path) -> None:
    for target in targets(path):
        for name, matchers in re.findall(r"(kvwarehouse_\w+)(\{[^}]*\})?", target.query):
            assert 'instance=~"$instance"' in matchers, name
            assert 'namespace=~"$namespace"' in matchers, name


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_how_bad_it_is_since_when_its_value_and_what_to_do(
    rule: dict[str, Any],
) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    says = rule["annotations"]
    assert set(says) == {"summary", "description", "action", "runbook_url"}
    # Of one that is a text, the value is the label.
    assert re.search(r"\$value|\$labels\.(state|health)", says["description"])
    for name in ("summary", "action", "runbook_url"):
        assert "{{" not in says[name]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_runbook_of_every_alert_is_a_heading_of_a_document(rule: dict[str, Any]) -> None:
    name, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    text = (ROOT / name).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    assert not anchor or anchor in anchors


def row_of(rule: dict[str, Any]) -> str:
    """Its line in the table of the document."""
    says, severity = rule["annotations"], rule["labels"]["severity"]
    name = f"`{rule['alert']}`"
    return f"| {name} | {severity} | {rule['for']} | {says['summary']} | {says['action']} |"


def test_table_of_alerts_in_the_document_is_that_of_the_rules() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `Kvwarehouse\w+` .*$", text, re.MULTILINE)
    assert rows == [row_of(rule) for rule in ALERTS]

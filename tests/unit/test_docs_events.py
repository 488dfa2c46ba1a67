"""docs/events.md has every event of the log, with its level, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvwarehouse.daemon import logs

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
SAID = re.compile(r'(?:events\.add|on_event)\(\s*"(\w+)"')


def documented(heading: str) -> list[tuple[str, str]]:
    """Names and levels, in a table's order."""
    part = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (\w+) \|", part, re.MULTILINE)
    return [(name, level) for names, level in rows for name in re.findall(r"`(\w+)`", names)]


def said_by_core() -> set[str]:
    folders = [each for each in (ROOT / "native").iterdir() if each.name not in ("tests", "fuzz")]
    sources = [path for each in folders for path in each.rglob("*") if path.suffix in (".cc", ".h")]
    return {name for path in sources for name in SAID.findall(path.read_text(encoding="utf-8"))}


FOUND = {
    "The daemon": {event.value: event.level for event in set(logs.Event) - {logs.Event.CORE}},
    "The core": logs.CORE_LEVELS,
}


@pytest.mark.parametrize("heading", FOUND)
def test_every_event_is_documented_once_with_its_level(heading: str) -> None:
    rows = documented(heading)
    assert dict(rows) == FOUND[heading]
    assert len(rows) == len(FOUND[heading])


def test_events_that_are_said_each_time_are_named() -> None:
    (named,) = re.findall(r"What operators do (.*?) has a line", TEXT, re.DOTALL)
    events = sorted(event for event in logs.Event if event.by_operators)
    assert sorted(re.findall(r"`(\w+)`", named)) == events != []


def test_every_event_of_the_core_has_one_level() -> None:
    rows = [name for names in logs._OF_CORE.values() for name in names]
    assert sorted(rows) == sorted(said_by_core())


def test_trouble_has_something_to_do_and_life_need_not() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (\w+) \|.*?\| *([^|]*?) *\|$", TEXT, re.MULTILINE)
    assert len(rows) > 70
    assert [names for names, level, what in rows if level != "info" and not what] == []

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


EVENTS = [each for each in logs.Event if each is not logs.Event.CORE]
FOUND = {
    "The daemon": {each.value: logs._level(each, None) for each in EVENTS},
    "The core": {name: logs._level(logs.Event.CORE, name) for name in said_by_core()},
}


@pytest.mark.parametrize("heading", FOUND)
def test_every_event_is_documented_once_with_its_level(heading: str) -> None:
    rows = documented(heading)
    assert dict(rows) == FOUND[heading]
    assert len(rows) == len(FOUND[heading])


def test_names_that_the_log_does_not_warn_of_are_said_by_the_core() -> None:
    assert said_by_core() >= logs._QUIET_IN_CORE

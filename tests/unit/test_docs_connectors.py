"""The page of each connector says what the code says: every setting, its default, the values it
names, commands that there are. What a page says besides is in a file of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.cli.commands import COMMANDS, find_plugins
from kvwarehouse_connectors.core.settings import PREFIX
from kvwarehouse_connectors.lmcache import settings as lmcache
from kvwarehouse_connectors.sglang import settings as sglang
from kvwarehouse_connectors.trtllm import settings as trtllm
from kvwarehouse_connectors.vllm import settings as vllm

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Page:
    """name: of the page. settings: the dataclass that its table is about. read: of a configuration
    as the engine hands it over. value: a default of the table as that configuration has it.
    named: what the table's meanings call a value. commands: some that the page must mention."""

    name: str
    settings: type
    read: Callable[[Mapping[str, Any]], Any]
    commands: frozenset[str]
    prefix: str = PREFIX
    value: Callable[[str], Any] = json.loads
    named: str = r'`("\w+")`'
    least_named: int = 3

    @property
    def text(self) -> str:
        return (DOCS / f"{self.name}.md").read_text(encoding="utf-8")

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Name without prefix as the dataclass has it, default, meaning."""
        row = rf"^\| `{self.prefix}(\w+)` \| `([^`]*)` \| (.+) \|$"
        found = re.findall(row, self.text, re.MULTILINE)
        return [(name.lower(), default, meaning) for name, default, meaning in found]

    def read_one(self, name: str, value: str) -> Any:
        return self.read({self.written(name): self.value(value)})

    def written(self, name: str) -> str:
        """The setting as a configuration says it: variables are in capitals."""
        return self.prefix + (name.upper() if self.prefix.isupper() else name)


PAGES = (
    Page(
        "vllm",
        vllm.Settings,
        lambda extra: vllm.read_settings(extra, "kv_both"),
        frozenset({"serve", "status", "doctor"}),
        least_named=4,
    ),
    Page(
        "sglang",
        sglang.Settings,
        sglang.read_settings,
        frozenset({"serve", "status", "ls", "doctor"}),
    ),
    Page(
        "lmcache",
        lmcache.Settings,
        lmcache.read_settings,
        frozenset({"serve", "status", "ls", "clear"}),
    ),
    Page(
        "trtllm",
        trtllm.Settings,
        lambda environ: trtllm.read_settings(environ, ""),
        frozenset({"serve", "status", "doctor"}),
        prefix=trtllm.PREFIX,
        value=str,
        named=r"`(\w+)`",
        least_named=4,
    ),
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
ROWS = [(page, name, default) for page in PAGES for name, default, _ in page.rows]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVW_ADDRESS", raising=False)


@each_page
def test_every_setting_is_in_the_table_and_every_row_is_a_setting(page: Page) -> None:
    assert [name for name, _, _ in page.rows] == [field.name for field in fields(page.settings)]


@pytest.mark.parametrize(
    ("page", "name", "default"), [pytest.param(*row, id=f"{row[0].name}-{row[1]}") for row in ROWS]
)
def test_default_in_the_table_is_the_default(page: Page, name: str, default: str) -> None:
    usual = getattr(page.settings(), name)
    if name == "address" or not default:  # something else is taken in its place
        assert page.value(default) == usual
    else:
        assert getattr(page.read_one(name, default), name) == usual


@each_page
def test_values_named_in_the_table_are_accepted(page: Page) -> None:
    named = [
        page.read_one(name, value)
        for name, _, meaning in page.rows
        for value in re.findall(page.named, meaning)
        if name != "address"  # names another setting
    ]
    assert len(named) >= page.least_named


@each_page
def test_commands_of_the_examples_are_commands(page: Page) -> None:
    known = {command.name for command in COMMANDS} | set(find_plugins())
    used = set(re.findall(r"(?:^|`)kvwarehouse ([a-z]+)", page.text, re.MULTILINE))
    assert page.commands <= used <= known

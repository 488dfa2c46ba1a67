"""The site that `make docs` has built: what the code has is on its page, and all links lead
somewhere. `make test-docs` builds it first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from kvwarehouse.config import ENVIRONMENT_PREFIX
from kvwarehouse.daemon.logs import Event
from kvwarehouse.wire import status_pb2, warehouse_pb2

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
NAMES = tomllib.loads((ROOT / "tests" / "fixtures" / "public_names.toml").read_text("utf-8"))

# What a browser asks for without a click; a link to follow is no such thing.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
IN_STYLES = re.compile(r"url\(\s*['\"]?([^)'\"]+)|@import\s+['\"]([^'\"]+)")


@dataclass
class Page(HTMLParser):
    """`headings`: the text below each heading, by its own text."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    text: str = ""
    headings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._heading: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if given.get(LOADED.get(tag, "")):
            self.loaded.append(given[LOADED[tag]])
        if tag in ("h1", "h2", "h3", "h4"):
            self._heading = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h1", "h2", "h3", "h4") and self._heading is not None:
            self.headings[self._heading.removesuffix("¶")] = ""
            self._heading = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._heading is not None:
            self._heading += data
        elif self.headings:
            self.headings[list(self.headings)[-1]] += data


@cache
def page(path: Path) -> Page:
    assert path.is_file(), f"{path} is not there: make docs"
    found = Page()
    found.feed(path.read_text("utf-8"))
    return found


def document(name: str) -> Page:
    return page(SITE / "docs" / f"{name}.html")


def pages() -> Iterator[Path]:
    found = sorted(SITE.rglob("*.html"))
    assert len(found) > 30, "make docs"
    return iter(found)


def missing(names: list[str], text: str) -> list[str]:
    """Those of `names` that `text` does not have as a whole word."""
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


COMMANDS = sorted(set(NAMES["command_line"]) - {"", "bench measures", "exit codes"})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_is_below_its_command(command: str) -> None:
    wanted = [word for each in NAMES["command_line"][command] for word in each.split()]
    wanted = [word for word in wanted if word not in ("-h", "--help")]
    below = document("reference/commands").headings[f"kvwarehouse {command}"]
    assert missing(wanted, below.partition("meaning")[2]) == []


def test_every_setting_has_its_flag_variable_and_key() -> None:
    headings = document("reference/settings").headings
    for key in NAMES["settings"]["serve"]:
        wanted = [f"--{key.replace('_', '-')}", ENVIRONMENT_PREFIX + key.upper(), key, "Default"]
        assert missing(wanted, headings[key]) == []
    assert missing(NAMES["settings"]["variables"], headings["Other variables"]) == []


def test_every_metric_is_there_with_its_type() -> None:
    text = document("reference/metrics").text
    assert [each for each in NAMES["metrics"]["names"] if "\n".join(each.split()) not in text] == []


def test_every_error_code_and_class_is_there() -> None:
    headings = document("reference/errors").headings
    classes = [each.split()[0] for each in NAMES["errors"]["classes"]]
    assert [name for name in (*NAMES["errors"]["codes"], *classes) if name not in headings] == []


def test_error_codes_come_with_what_happened_and_what_to_do() -> None:
    headings = document("reference/errors").headings
    unknown = "The text says what happened."
    silent = [code for code in NAMES["errors"]["codes"] if headings[code].strip() == unknown]
    assert len(silent) < len(NAMES["errors"]["codes"]) / 20, silent


def test_every_event_is_there() -> None:
    assert missing([*(set(Event) - {Event.CORE})], document("events").text) == []


@pytest.mark.parametrize("file", [warehouse_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR])
def test_every_message_field_and_call_of_grpc_is_there(file: object) -> None:
    headings = document("reference/grpc").headings
    for name, message in file.message_types_by_name.items():
        assert missing([item.name for item in message.fields], headings[name]) == []
    for service in file.services_by_name.values():
        assert {f"{service.name}.{each.name}" for each in service.methods} <= set(headings)


@pytest.mark.parametrize("module", NAMES["python"])
def test_every_public_python_name_is_there(module: str) -> None:
    found = document("reference/python")
    names = [f"{module}.{name}" for name in NAMES["python"][module]]
    assert [name for name in names if not found.ids & {name, f"module-{name}"}] == []


def test_every_link_within_the_site_leads_somewhere() -> None:
    broken = [
        f"{path.relative_to(SITE)}: {link}"
        for path in pages()
        for link in (*page(path).links, *page(path).loaded)
        if not urlsplit(link).scheme and not leads_somewhere(path, link)
    ]
    assert broken == []


def leads_somewhere(path: Path, link: str) -> bool:
    parts = urlsplit(link)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return False
    return not parts.fragment or unquote(parts.fragment) in page(target).ids


def test_no_page_and_no_style_asks_another_host() -> None:
    asked = [(path.name, url) for path in pages() for url in page(path).loaded]
    for path in SITE.rglob("*.css"):
        asked += [(path.name, a or b) for a, b in IN_STYLES.findall(path.read_text("utf-8"))]
    assert len(asked) > 100
    elsewhere = [(name, url) for name, url in asked if urlsplit(url).netloc]
    assert elsewhere == []


def test_readme_is_the_front_page() -> None:
    title = (ROOT / "README.md").read_text("utf-8").partition("\n")[0].removeprefix("# ")
    assert next(iter(page(SITE / "index.html").headings)) == title

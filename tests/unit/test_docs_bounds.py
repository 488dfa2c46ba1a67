"""The table of bounds in docs/guarantees.md: its tests exist, and its values are the code's."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse import RequestNote, config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.partition("## Every bound\n")[2].partition("\n## ")[0].splitlines()
    if line.startswith("|") and not line.startswith(("| what |", "|--"))
]
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}
NATIVE = "\n".join(
    path.read_text(encoding="utf-8")
    for path in (ROOT / "native").glob("*/*")
    if path.suffix in (".h", ".cc") and path.parent.name not in ("tests", "fuzz", "bench")
)
_PACKAGES = {
    "limits": "wire",
    **dict.fromkeys(("gets", "epochs", "delta_reader", "damaged_objects"), "remote"),
}
VALUE = re.compile(r"([\d,.]+)(?: (KiB|MiB|GiB|s))? \(`([-\w.]+)`\)")


def native(name: str) -> Any:
    """What a constant of the core is."""
    found = set(re.findall(rf"constexpr \w+(?:<\w+>)? {name} =\s+([^;]+);", NATIVE))
    assert len(found) == 1, f"{name} is {found or 'not there'}"
    text = re.sub(r"(?<=\d)(?:ull|u)\b", "", found.pop()).replace("kSecondNs", "1")
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.expr) -> Any:
    """Of numbers, products and shifts."""
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        return left * right if isinstance(node.op, ast.Mult) else left << right
    assert isinstance(node, ast.Constant), ast.dump(node)
    return node.value


def option(flag: str) -> Any:
    """Its default."""
    for item in dataclasses.fields(config.Config):
        if item.metadata and (item.metadata["key"] or item.name) == flag[2:].replace("-", "_"):
            return item.default
    raise AssertionError(f"{flag} is no option of the daemon")


def named(name: str) -> Any:
    if name.startswith("--"):
        return option(name)
    module, _, constant = name.rpartition(".")
    if not module:
        return native(name)
    if module == RequestNote.__name__:
        return getattr(RequestNote, constant)
    package = _PACKAGES.get(module, "daemon")
    return getattr(importlib.import_module(f"kvwarehouse.{package}.{module}"), constant)


def test_table_names_values_and_tests() -> None:
    assert len(ROWS) > 35
    assert all(len(row) == 5 and all(row) for row in ROWS)
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bound_is_that_of_the_code(row: list[str]) -> None:
    values = VALUE.findall(" ".join(row))
    assert len(values) == " ".join(row).count("(`"), "a value is not followed by what it is"
    for number, unit, name in values:
        written = float(number.replace(",", "")) * UNITS[unit]
        assert math.isclose(named(name), written), f"{name} is {named(name)}"
    flags = re.findall(r"`(--[-\w]+)`", " ".join(row))
    assert all(option(flag) is not None for flag in flags)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bound_is_reached_by_the_tests_it_names(row: list[str]) -> None:
    tests = re.findall(r"`([\w]+\.(?:py|cc))::(\w+)`", row[-1])
    assert tests, "it names no test"
    for file, name in tests:
        native_ = file.endswith(".cc")
        paths = ROOT.glob(f"native/tests/{file}" if native_ else f"tests/**/{file}")
        begins = f"TEST({name})" if native_ else f"def {name}("
        texts = [path.read_text(encoding="utf-8") for path in paths]
        assert any(begins in text for text in texts), f"no {file} has {name}"

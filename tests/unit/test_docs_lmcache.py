"""docs/lmcache.md says what the code says: every setting, its default, examples."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse_connectors.lmcache as connector
from kvwarehouse_connectors.common.setting_values import PREFIX
from kvwarehouse_connectors.lmcache.settings import Settings, read_settings

TEXT = (Path(__file__).parents[2] / "docs" / "lmcache.md").read_text(encoding="utf-8")
ROWS = re.findall(rf"^\| `{PREFIX}(\w+)` \| `([^`]*)` \| (.+) \|$", TEXT, re.MULTILINE)


def configs() -> list[dict[str, Any]]:
    told = re.findall(r"--l2-adapter '(.*?)'\n", f"{TEXT}{connector.__doc__}", re.DOTALL)
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    return [json.loads(text) for text in [*told, *blocks]]


def test_every_setting_is_in_the_table_and_every_row_is_a_setting() -> None:
    assert [name for name, _, _ in ROWS] == [field.name for field in fields(Settings)]


@pytest.mark.parametrize(("name", "default"), [(name, default) for name, default, _ in ROWS])
def test_default_in_the_table_is_the_default(name: str, default: str) -> None:
    written = read_settings({PREFIX + name: json.loads(default)})
    if name == "address":
        assert json.loads(default) == Settings().address
    else:
        assert getattr(written, name) == getattr(Settings(), name)


def test_values_named_in_the_table_are_accepted() -> None:
    named = [
        read_settings({PREFIX + name: json.loads(value)})
        for name, _, meaning in ROWS
        for value in re.findall(r'`("\w+")`', meaning)
    ]
    assert len(named) >= 3


def test_configurations_of_the_examples_are_accepted_and_name_the_connector() -> None:
    found = configs()
    assert len(found) == 3
    for config in found:
        module = importlib.import_module(config["module_path"])
        assert config["type"] == "plugin"
        assert config["class_name"] in module.__all__
        read_settings(config["adapter_params"])


def test_commands_of_the_examples_are_commands() -> None:
    from kvwarehouse.cli.commands import COMMANDS

    known = {command.name for command in COMMANDS}
    used = set(re.findall(r"(?:^|`)kvwarehouse ([a-z]+)", TEXT, re.MULTILINE))
    assert {"serve", "status", "ls", "clear"} <= used <= known

"""docs/sglang.md says what the code says: every setting, its default, examples."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse_connectors.sglang as connector
from kvwarehouse_connectors.common.setting_values import PREFIX
from kvwarehouse_connectors.sglang.settings import Settings, read_settings

TEXT = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text(encoding="utf-8")
ROWS = re.findall(rf"^\| `{PREFIX}(\w+)` \| `([^`]*)` \| (.+) \|$", TEXT, re.MULTILINE)


def configs() -> list[dict[str, Any]]:
    shell = re.findall(r"--hicache-storage-backend-extra-config '(.*?)'", TEXT, re.DOTALL)
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    told = re.findall(
        r"--hicache-storage-backend-extra-config '(.*?)'", str(connector.__doc__), re.S
    )
    return [json.loads(text) for text in [*shell, *blocks, *told]]


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
        assert config["class_name"] in module.__all__
        assert config["interface_v1"] == 1
        read_settings(config)


def test_commands_of_the_examples_are_commands() -> None:
    from kvwarehouse.cli.commands import COMMANDS
    from kvwarehouse.cli.plugins import find_plugins

    known = {command.name for command in COMMANDS} | set(find_plugins())
    used = set(re.findall(r"(?:^|`)kvwarehouse ([a-z]+)", TEXT, re.MULTILINE))
    assert {"serve", "status", "ls", "doctor"} <= used <= known

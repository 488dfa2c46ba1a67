"""docs/lmcache.md has examples that the code accepts; its table is in test_docs_connectors.py."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import kvwarehouse_connectors.lmcache as connector
from kvwarehouse_connectors.lmcache.settings import read_settings

TEXT = (Path(__file__).parents[2] / "docs" / "lmcache.md").read_text(encoding="utf-8")


def configs() -> list[dict[str, Any]]:
    told = re.findall(r"--l2-adapter '(.*?)'\n", f"{TEXT}{connector.__doc__}", re.DOTALL)
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    return [json.loads(text) for text in [*told, *blocks]]


def test_configurations_of_the_examples_are_accepted_and_name_the_connector() -> None:
    found = configs()
    assert len(found) == 3
    for config in found:
        module = importlib.import_module(config["module_path"])
        assert config["type"] == "plugin"
        assert config["class_name"] in module.__all__
        read_settings(config["adapter_params"])

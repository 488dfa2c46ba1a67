"""docs/sglang.md has examples that the code accepts; its table is in test_docs_connectors.py."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import kvwarehouse_connectors.sglang as connector
from kvwarehouse_connectors.sglang.settings import read_settings

TEXT = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text(encoding="utf-8")


def configs() -> list[dict[str, Any]]:
    shell = re.findall(r"--hicache-storage-backend-extra-config '(.*?)'", TEXT, re.DOTALL)
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    told = re.findall(
        r"--hicache-storage-backend-extra-config '(.*?)'", str(connector.__doc__), re.S
    )
    return [json.loads(text) for text in [*shell, *blocks, *told]]


def test_configurations_of_the_examples_are_accepted_and_name_the_connector() -> None:
    found = configs()
    assert len(found) == 3
    for config in found:
        module = importlib.import_module(config["module_path"])
        assert config["class_name"] in module.__all__
        assert config["interface_v1"] == 1
        read_settings(config)

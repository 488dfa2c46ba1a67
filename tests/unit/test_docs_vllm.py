"""docs/vllm.md has examples that the code accepts; its table is in test_docs_connectors.py."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_connectors import vllm_tier
from kvwarehouse_connectors.vllm.handoff import RECORD, Record, decode
from kvwarehouse_connectors.vllm.settings import PREFIX, Settings, read_settings
from kvwarehouse_connectors.vllm_tier import settings as tier

TEXT = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")


def json_blocks() -> list[Any]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]


def transfer_configs() -> list[dict[str, Any]]:
    shell = re.findall(r"--kv-transfer-config '(.*?)'", TEXT, re.DOTALL)
    found = [json.loads(text) for text in shell]
    return found + [block for block in json_blocks() if "kv_connector" in block]


def test_configurations_of_the_examples_are_accepted() -> None:
    configs = [one for one in transfer_configs() if one["kv_connector"] == "WarehouseConnector"]
    assert len(configs) >= 2
    for config in configs:
        assert config["kv_load_failure_policy"] == "recompute"
        read_settings(config.get("kv_connector_extra_config", {}), config["kv_role"])


def test_configuration_of_the_tier_is_accepted() -> None:
    (config,) = [one for one in transfer_configs() if one["kv_connector"] != "WarehouseConnector"]
    module = "kvwarehouse_connectors.vllm_tier"
    assert config["kv_connector"] in vllm_tier.__all__
    assert config["kv_connector_module_path"] == module
    (entry,) = config["kv_connector_extra_config"]["secondary_tiers"]
    assert entry.pop("type") in vllm_tier.__all__
    assert entry.pop("module_path") == module
    tier.read_settings(entry)


def test_settings_of_the_tier_mean_what_they_mean_for_the_connector() -> None:
    said = re.search(r"`secondary_tiers`.+?each after `kvwarehouse\.`", TEXT, re.DOTALL)
    assert said is not None
    names = [name for name in re.findall(r"`(\w+)`", said[0]) if name != "secondary_tiers"]
    usual = {field.name: field.default for field in fields(Settings)}
    assert names == [field.name for field in fields(tier.TierSettings)]
    assert all(field.default == usual[field.name] for field in fields(tier.TierSettings))


def test_record_of_the_examples_is_one() -> None:
    (record,) = [block for block in json_blocks() if RECORD in block]
    assert isinstance(decode(record), Record)


def test_every_name_of_the_connector_in_the_text_exists() -> None:
    known = {field.name for field in fields(Settings)} | {"load", "store", "handoff"}
    names = set(re.findall(r"`\"?kvwarehouse\.(\w+)\"?`", TEXT))
    assert names <= known
    with pytest.raises(kvw.UsageError):
        read_settings({PREFIX + "no_such_name": 1}, "kv_both")


def python_blocks() -> Iterator[str]:
    yield from re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_python_of_the_examples_compiles() -> None:
    assert [ast.parse(block) for block in python_blocks()]

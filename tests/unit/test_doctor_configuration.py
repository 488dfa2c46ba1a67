"""What the doctor reads of an engine's configuration, and what it makes of a model's pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvwarehouse_connectors.doctor.configuration import config_facts
from kvwarehouse_connectors.doctor.facts import ConfigFacts, EngineFacts
from kvwarehouse_connectors.doctor.pages import page_facts

VALUES = {"interface_v1": 1, "kvwarehouse.address": "unix:///run/kvw.sock"}
TOML = 'interface_v1 = 1\n"kvwarehouse.address" = "unix:///run/kvw.sock"\n'
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
}


def test_nothing_given_is_no_error() -> None:
    assert config_facts("") == ConfigFacts()


@pytest.mark.parametrize("begin", ["", "@", " "])
def test_json_is_read_from_the_command_line_and_from_files(begin: str, tmp_path: Path) -> None:
    file = tmp_path / "extra.json"
    file.write_text(json.dumps(VALUES))
    text = f"{begin}{json.dumps(VALUES)}" if begin == " " else f"{begin}{file}"
    assert config_facts(text) == ConfigFacts(given=True, values=VALUES)


def test_toml_is_read(tmp_path: Path) -> None:
    file = tmp_path / "extra.toml"
    file.write_text(TOML)
    assert config_facts(str(file)).values == VALUES


def test_yaml_is_read_with_the_environments_own_package(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="engines bring PyYAML, this environment has none")
    file = tmp_path / "config.yaml"
    file.write_text("kv_connector_config:\n  server_url: unix:///run/kvw.sock\n")
    expected = {"kv_connector_config": {"server_url": "unix:///run/kvw.sock"}}
    assert config_facts(str(file)).values == expected
    file.write_text("a: [1")
    assert "not YAML" in config_facts(str(file)).error


def test_yaml_without_a_package_for_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    file = tmp_path / "config.yaml"
    file.write_text("{}")
    assert "PyYAML" in config_facts(str(file)).error


def test_broken_yaml_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract model of PyYAML: safe_load, and YAMLError, which is no ValueError."""
    model: Any = ModuleType("yaml")
    model.YAMLError = type("YAMLError", (Exception,), {})

    def safe_load(text: str) -> Any:
        raise model.YAMLError(f"line 3 of {text}")

    model.safe_load = safe_load
    monkeypatch.setitem(sys.modules, "yaml", model)
    file = tmp_path / "config.yml"
    file.write_text("what")
    assert config_facts(str(file)).error == "not YAML: line 3 of what"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("", '{"interface_v1": 1', "not JSON"),
        ("", "interface_v1=1", "neither an object in JSON nor a file .json, .toml"),
        ("", "/no/such/file.json", "No such file"),
        ("broken.json", "{", "broken.json"),
        ("broken.toml", "=", "broken.toml"),
        ("list.json", "[1]", "has list, not names with values"),
        ("bytes.json", b"\xff\xfe", "bytes.json"),
    ],
)
def test_what_cannot_be_read_is_named(
    name: str, content: str | bytes, words: str, tmp_path: Path
) -> None:
    text = str(content)
    if name:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        text = str(file)
    facts = config_facts(text)
    assert facts.given
    assert words in facts.error
    assert not facts.values


def test_pages_of_a_model_are_those_that_size_tells(tmp_path: Path) -> None:
    """2 x 32 layers x 8 heads x 128 dimensions x 2 bytes, for each of 64 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    facts = page_facts(str(tmp_path), 64, "")
    assert (facts.page_bytes, facts.kinds, facts.error) == (131_072 * 64, 1, "")
    assert page_facts(str(tmp_path), 64, "fp8").page_bytes < facts.page_bytes


def test_known_model_needs_no_files_and_windows_are_another_kind_of_layer() -> None:
    assert page_facts("llama-3.3-70b", 16, "").kinds == 1
    assert page_facts("gpt-oss-120b", 16, "").kinds == 2


def test_step_of_a_rank_has_its_share_and_of_windows_what_they_reach() -> None:
    engine = EngineFacts(command_step_tokens=8192, command_tp=2)
    assert page_facts("llama-3.1-8b", 16, "", engine).step_bytes == 131_072 // 2 * 8192
    hybrid = page_facts("gpt-oss-20b", 16, "", engine).step_bytes
    assert 24_576 // 2 * 8192 < hybrid < 1.1 * 24_576 // 2 * 8192
    assert page_facts("llama-3.1-8b", 16, "").step_bytes == 0


@pytest.mark.parametrize("model", ["llama-99", "/dev/null"])
def test_model_that_is_none_is_named(model: str) -> None:
    facts = page_facts(model, 16, "")
    assert model in facts.error
    assert facts.page_bytes == 0


def test_no_model_is_no_error() -> None:
    facts = page_facts("", 16, "")
    assert (facts.model, facts.error) == ("", "")

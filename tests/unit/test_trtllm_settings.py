"""What server_url and TLLM_KVW_* may say: read once, checked, by name. Needs no TensorRT-LLM."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_connectors.core.settings import MODES
from kvwarehouse_connectors.trtllm.keys import PromptKeys
from kvwarehouse_connectors.trtllm.settings import PREFIX, Settings, read_settings

TEXT = (Path(__file__).parents[2] / "docs" / "trtllm.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVW_ADDRESS", raising=False)


def read(server_url: str = "", **values: str) -> Settings:
    return read_settings({PREFIX + name: text for name, text in values.items()}, server_url)


def refusal(server_url: str = "", **values: str) -> str:
    with pytest.raises(kvw.UsageError) as refused:
        read(server_url, **values)
    return f"{refused.value.code}: {refused.value}"


def test_nothing_said_is_every_default() -> None:
    found = read()
    assert found.address == kvw.default_address()
    for field in fields(Settings):
        if field.name != "address":
            assert getattr(found, field.name) == field.default


def test_variables_of_others_are_left_alone() -> None:
    assert read_settings({"TLLM_LOG_LEVEL": "info", "PATH": "/bin"}, "") == read()


@pytest.mark.parametrize("name", ["ADRESS", "MODES", ""])
def test_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    told = refusal(**{name: "x"})
    assert told.startswith(f"bad_setting: {PREFIX}{name} = 'x' is unknown")
    assert all(PREFIX + field.name.upper() in told for field in fields(Settings))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("MODE", "read_only", "read_only"),
        ("VERIFY", "boundary", "boundary"),
        ("WEIGHTS", "model-7", "model-7"),
        ("SALT", "tenant", "tenant"),
        ("STAGING_BYTES", "1GiB", 1 << 30),
        ("LOAD", "sync", "sync"),
        ("LOOKUP_BUDGET_S", "0", 0.0),
        ("LOAD_TIMEOUT_S", "600", 600.0),
        ("STORE_TIMEOUT_S", "0.5", 0.5),
        ("HOLD_S", "0", 0.0),
        ("STORE_GENERATED", "False", False),
        ("STORE_GENERATED", "1", True),
    ],
)
def test_good_value_is_taken(name: str, text: str, value: Any) -> None:
    assert getattr(read(**{name: text}), name.lower()) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MODE", "readonly"),
        ("VERIFY", ""),
        ("STAGING_BYTES", "1KiB"),
        ("STAGING_BYTES", "much"),
        ("LOAD", "layerwise"),
        ("LOOKUP_BUDGET_S", "-1"),
        ("LOOKUP_BUDGET_S", "soon"),
        ("LOAD_TIMEOUT_S", "0"),
        ("LOAD_TIMEOUT_S", "nan"),
        ("STORE_TIMEOUT_S", "inf"),
        ("HOLD_S", "61"),
        ("STORE_GENERATED", "yes"),
        ("ADDRESS", "tcp://host:1"),
    ],
)
def test_bad_value_is_refused_with_its_name(name: str, text: str) -> None:
    assert PREFIX + name in refusal(**{name: text})


def test_server_url_is_the_address_and_must_not_differ_from_the_other() -> None:
    assert read("unix:///a").address == "unix:///a"
    assert read("unix:///a", ADDRESS="unix:///a").address == "unix:///a"
    assert "differs from server_url" in refusal("unix:///a", ADDRESS="unix:///b")


@pytest.mark.parametrize("mode", MODES)
def test_mode_says_what_is_done(mode: str) -> None:
    found = read(MODE=mode)
    assert (found.loads, found.stores) == (mode != "write_only", mode != "read_only")


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        read().mode = "read_only"  # type: ignore[misc]


# -- docs/trtllm.md, whose table is in test_docs_connectors.py -------------------------------------


def test_yaml_of_the_document_names_the_classes_there_are() -> None:
    yaml = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert yaml is not None
    given = dict(re.findall(r"^  (connector_\w+|server_url): (\S+)$", yaml[1], re.MULTILINE))
    assert given["connector_module"] == "kvwarehouse_connectors.trtllm"
    assert {given["connector_scheduler_class"], given["connector_worker_class"]} == {
        "WarehouseScheduler",
        "WarehouseWorker",
    }
    assert read(given["server_url"]).address == given["server_url"]


# -- keys ------------------------------------------------------------------------------------------


def keys_of(tokens: list[int], salt: bytes = b"", block_tokens: int = 4) -> list[bytes]:
    keys = PromptKeys(salt, block_tokens)
    keys.extend(tokens)
    return list(keys.keys(0, keys.count(1), 1))


def test_key_names_its_whole_prefix_and_its_salt() -> None:
    tokens = list(range(16))
    every = {*keys_of(tokens), *keys_of(tokens, b"a"), *keys_of([9, *tokens[1:]])}
    assert len(every) == 12
    assert keys_of(tokens[:15]) == keys_of(tokens)[:3]


def test_keys_grow_as_tokens_come_and_are_the_same_however_they_came() -> None:
    tokens = [7, 0, (1 << 32) - 1, *range(50)]
    keys = PromptKeys(b"s", 4)
    for token in tokens:
        keys.extend([token])
    assert list(keys.keys(0, 13, 1)) == keys_of(tokens, b"s")
    keys.replace(tokens + [1] * 8)
    assert list(keys.keys(0, 15, 1)) == keys_of(tokens + [1] * 8, b"s")
    keys.replace([5] * 9)
    assert list(keys.keys(0, keys.count(1), 1)) == keys_of([5] * 9, b"s")


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_token_out_of_range_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        keys_of([1, token])

"""What kv_connector_extra_config may say: read once, checked, by name. Needs no vLLM."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_connectors.core.settings import MODES
from kvwarehouse_connectors.vllm.settings import PREFIX, ROLES, Settings, read_settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVW_ADDRESS", raising=False)


def read(role: str = "kv_both", **values: Any) -> Settings:
    return read_settings({PREFIX + name: value for name, value in values.items()}, role)


def refusal(role: str = "kv_both", **values: Any) -> str:
    with pytest.raises(kvw.UsageError) as refused:
        read(role, **values)
    return f"{refused.value.code}: {refused.value}"


def test_nothing_said_is_every_default() -> None:
    expected = {field.name: field.default for field in fields(Settings)}
    found = read()
    assert {**expected, "address": kvw.default_address()} == {
        field.name: getattr(found, field.name) for field in fields(Settings)
    }


def test_what_belongs_to_others_is_left_alone() -> None:
    assert read_settings({"some_connector.mode": "x", "shared_path": "/x"}, "kv_both") == read()


@pytest.mark.parametrize("name", ["adress", "Mode", "mode ", "", "prefill_tokens_per_s "])
def test_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    told = refusal(**{name: "x"})
    assert told.startswith("bad_setting: ")
    assert f"{PREFIX}{name} = 'x' is unknown" in told
    assert all(field.name in told for field in fields(Settings))


GOOD: list[tuple[str, Any, Any]] = [
    ("address", "unix:///run/kvw/kvw.sock", "unix:///run/kvw/kvw.sock"),
    ("mode", "read_only", "read_only"),
    ("mode", "write_only", "write_only"),
    ("verify", "boundary", "boundary"),
    ("weights", "my-model-7", "my-model-7"),
    ("salt", "tenant", "tenant"),
    ("device_copies", "off", "off"),
    ("staging_bytes", "1GiB", 1 << 30),
    ("staging_bytes", 0, 0),
    ("staging_bytes", 1 << 20, 1 << 20),
    ("staging_bytes", "1TiB", 1 << 40),
    ("load", "always", "always"),
    ("load_timeout_s", 1, 1.0),
    ("load_timeout_s", 0.001, 0.001),
    ("store_timeout_s", 600, 600.0),
    ("handoff_wait_s", 0, 0.0),
    ("keep_limit_s", 0, 0.0),
    ("keep_limit_s", 86_400, 86_400.0),
    ("prefill_tokens_per_s", 5e4, 5e4),
    ("store_generated", False, False),
]
BAD: list[tuple[str, Any]] = [
    ("address", 7),
    ("mode", "readonly"),
    ("mode", None),
    ("mode", ["read_only"]),
    ("verify", "never"),
    ("verify", True),
    ("weights", 1.5),
    ("salt", b"bytes"),
    ("device_copies", "on"),
    ("device_copies", True),
    ("staging_bytes", "1 banana"),
    ("staging_bytes", (1 << 20) - 1),
    ("staging_bytes", (1 << 40) + 1),
    ("staging_bytes", -1),
    ("staging_bytes", True),
    ("staging_bytes", None),
    ("load", "never"),
    ("load_timeout_s", 0),
    ("load_timeout_s", 601),
    ("load_timeout_s", "5"),
    ("load_timeout_s", float("nan")),
    ("load_timeout_s", True),
    ("store_timeout_s", -1),
    ("handoff_wait_s", 61),
    ("keep_limit_s", -1),
    ("keep_limit_s", "1h"),
    ("prefill_tokens_per_s", -1),
    ("prefill_tokens_per_s", float("inf")),
    ("store_generated", "false"),
    ("store_generated", 0),
]


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_good_value_is_taken(name: str, value: Any, expected: Any) -> None:
    found = getattr(read(**{name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    told = refusal(**{name: value})
    assert name in told
    assert PREFIX in told


def test_every_setting_is_tried_with_good_and_bad_values() -> None:
    names = {field.name for field in fields(Settings)}
    assert {name for name, _, _ in GOOD} == {name for name, _ in BAD} == names


ROLE_MODES = {
    ("kv_both", "read_write"): (True, True),
    ("kv_both", "read_only"): (True, False),
    ("kv_both", "write_only"): (False, True),
    ("kv_producer", "read_write"): (False, True),
    ("kv_producer", "write_only"): (False, True),
    ("kv_producer", "read_only"): None,
    ("kv_consumer", "read_write"): (True, False),
    ("kv_consumer", "read_only"): (True, False),
    ("kv_consumer", "write_only"): None,
}


@pytest.mark.parametrize(("role", "mode"), [(role, mode) for role in ROLES for mode in MODES])
def test_role_and_mode_say_together_what_is_loaded_and_stored(role: str, mode: str) -> None:
    expected = ROLE_MODES[role, mode]
    if expected is None:
        told = refusal(role, mode=mode)
        assert role in told
        assert mode in told
        return
    found = read(role, mode=mode)
    assert (found.loads, found.stores) == expected


def test_address_is_the_settings_then_the_environments_then_this_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read().address == kvw.default_address()
    monkeypatch.setenv("KVW_ADDRESS", "unix:///env.sock")
    assert read().address == "unix:///env.sock"
    assert read(address="unix:///set.sock").address == "unix:///set.sock"


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        read().mode = "read_only"  # type: ignore[misc]

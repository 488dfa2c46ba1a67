"""The error tree: stable codes, and nothing lost on the way from the core or across processes."""

from __future__ import annotations

import pickle

import pytest

from kvwarehouse import errors

CLASSES = list(errors.BY_KIND.values())


@pytest.mark.parametrize("kind", ["usage", "capacity", "pin", "storage", "transport", "internal"])
def test_native_kind_becomes_its_class(kind: str) -> None:
    error = errors.from_native(kind, "some_code", "what happened")
    assert type(error).__name__.lower() == f"{kind}error"
    assert (error.code, str(error), error.context) == ("some_code", "what happened", {})


def test_unknown_native_kind_becomes_internal_and_keeps_its_text() -> None:
    error = errors.from_native("weird", "c", "what happened")
    assert isinstance(error, errors.InternalError)
    assert "what happened" in str(error)
    assert "weird" in str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_a_warehouse_error_with_a_default_code(
    cls: type[errors.WarehouseError],
) -> None:
    error = cls("text")
    assert isinstance(error, errors.WarehouseError)
    assert error.code == cls.kind


def test_only_capacity_and_transport_are_retryable() -> None:
    retryable = {cls for cls in CLASSES if cls("text").retryable}
    assert retryable == {errors.CapacityError, errors.TransportError}


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_a_pickle(cls: type[errors.WarehouseError]) -> None:
    error = cls("text", code="c", retryable=True, context={"field": "x", "value": 7})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (again.message, again.code, again.retryable) == ("text", "c", True)
    assert again.context == {"field": "x", "value": "7"}


def test_usage_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="text"):
        raise errors.UsageError("text")

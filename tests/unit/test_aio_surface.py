"""The two clients have one surface: neither grows, loses or changes a name without the other."""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import Callable
from typing import Any, get_origin, get_type_hints

import pytest

import kvwarehouse as kvw
from kvwarehouse.aio.transport import AsyncTransport
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.client.routing import who_has
from kvwarehouse.client.transport import Transport

TWINS = {"Client": (kvw.Client, kvw.aio.Client), "ns": (kvw.OpenNamespace, kvw.aio.OpenNamespace)}
# Not awaited there: no call, no wait.
PLAIN = {"address", "local"}


def public(owner: type) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", TWINS)
def test_twins_have_the_same_names(name: str) -> None:
    blocking, awaited = TWINS[name]
    assert public(awaited).keys() == public(blocking).keys()
    for made in ("enter", "exit"):
        assert hasattr(blocking, f"__{made}__") == hasattr(awaited, f"__a{made}__")


def test_transports_of_both_take_the_same_requests() -> None:
    blocking, awaited = public(Transport), public(AsyncTransport)
    assert awaited.keys() == blocking.keys()
    for name in ("has_namespace", "lookup", "load", "store"):
        mine, twin = inspect.signature(blocking[name]), inspect.signature(awaited[name])
        assert twin == mine
        assert inspect.iscoroutinefunction(awaited[name])


def methods() -> list[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    found: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
        ("connect", kvw.connect, kvw.aio.connect),
        ("connect_grpc", connect_grpc, inspect.getmodule(kvw.aio.connect).connect_grpc),  # type: ignore[union-attr]
        ("who_has", who_has, kvw.aio.who_has),
    ]
    for twin, (blocking, awaited) in TWINS.items():
        for name, method in public(blocking).items():
            if callable(method):
                found.append((f"{twin}.{name}", method, public(awaited)[name]))
    return found


METHODS = methods()


@pytest.mark.parametrize(
    ("blocking", "awaited"), [m[1:] for m in METHODS], ids=[m[0] for m in METHODS]
)
def test_twins_take_the_same_arguments_and_are_awaited_or_iterated(
    blocking: Callable[..., Any], awaited: Callable[..., Any]
) -> None:
    mine, twin = inspect.signature(blocking), inspect.signature(awaited)
    assert twin.parameters == mine.parameters
    assert inspect.getdoc(awaited)
    returned, of = get_type_hints(blocking)["return"], get_type_hints(awaited)["return"]
    if get_origin(returned) is collections.abc.Iterator:
        assert get_origin(of) is collections.abc.AsyncIterator
        assert of.__args__ == returned.__args__
        assert not inspect.iscoroutinefunction(awaited)
    else:
        assert inspect.iscoroutinefunction(awaited)
        twins = dict(TWINS.values())
        assert of == twins.get(returned, returned)


@pytest.mark.parametrize("name", TWINS)
def test_what_is_no_method_is_a_property_of_both(name: str) -> None:
    for owner in TWINS[name]:
        plain = {key for key, value in public(owner).items() if not callable(value)}
        assert plain <= PLAIN
        assert all(isinstance(public(owner)[key], property) for key in plain)

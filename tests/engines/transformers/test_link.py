"""A daemon that is not there is asked for again, but not at every prompt."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_connectors.transformers.link import Link

SPACE = kvw.Namespace(
    model="m", weights="w", dtype="float32", layout="test/1", page_tokens=16, page_bytes=4096
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_namespace_is_opened_once(warehouse: Any) -> None:
    link = Link(warehouse, SPACE)
    assert link.opened() is link.opened()


def test_absent_daemon_is_asked_again_only_after_a_while(warehouse: Any, clock: Clock) -> None:
    warehouse.broken = {"open"}
    link = Link(warehouse, SPACE, clock)
    with pytest.raises(kvw.TransportError):
        link.opened()
    warehouse.broken = set()
    with pytest.raises(kvw.TransportError):
        link.opened()
    clock.now_s += 2.0
    assert link.opened().space == SPACE


def test_absent_daemon_keeps_nothing_of_who_asked(warehouse: Any, clock: Clock) -> None:
    """The error was kept with the frames that it was raised through, and so was the KV cache of
    every prompt that found no daemon."""
    warehouse.broken = {"open"}
    link = Link(warehouse, SPACE, clock)

    def ask() -> Any:
        cache = Clock()
        with pytest.raises(kvw.TransportError, match="open: no daemon") as refused:
            link.opened()
        assert refused.value.code == "no_daemon"
        return weakref.ref(cache)

    caches = []
    for wait_s in (0.0, 0.5, 0.5, 2.0, 0.5):
        clock.now_s += wait_s
        caches.append(ask())
    gc.collect()
    assert [kept() for kept in caches] == [None] * 5


def test_connected_client_is_closed_and_a_given_one_is_not(
    warehouse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(warehouse, "close", lambda: closed.append(True))
    given = Link(warehouse, SPACE)
    given.opened()
    given.close()
    assert closed == []
    monkeypatch.setattr(kvw, "connect", lambda address, timeout_s: warehouse)
    connected = Link("unix:///there.sock", SPACE)
    connected.opened()
    connected.close()
    connected.close()
    assert closed == [True]

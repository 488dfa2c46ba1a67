"""What an engine's requests wish to be kept: asked for until it is there, and never waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse.client.keeps import Keep
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_connectors.core import prompt_keeper
from kvwarehouse_connectors.core.prompt_keeper import KeepPart, KeepWish, PromptKeeper

SPACE = b"n" * 16


class Client:
    """Stands in for one of a daemon: of each prompt as many pages are stored as `stored` says."""

    def __init__(self) -> None:
        self.stored = 3
        self.error: Exception | None = None
        self.asked: list[tuple[str, int]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def keep(self, space: bytes, *, keys: Any, ttl_s: float, name: str) -> Keep:
        self.asked.append((name, len(keys)))
        self.may_answer.wait()
        if self.error is not None:
            raise self.error
        pages = min(self.stored, len(keys))
        return Keep(name, space, "m", pages, 8 * pages, ttl_s, ttl_s, renewed=False)


class Connection:
    def __init__(self) -> None:
        self.client: Client | None = Client()


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def keeper(connection: Any) -> Iterator[PromptKeeper]:
    made = PromptKeeper(connection)
    yield made
    made.close()


def wish(name: str = "a", keys: int = 3, parts: int = 1) -> KeepWish:
    made = [KeepPart(SPACE, [bytes([at]) for at in range(keys)]) for _ in range(parts)]
    return KeepWish(name, 60.0, made)


def counts(keeper: PromptKeeper) -> dict[str, int]:
    return dict(eventually(keeper.take_counts, "it is done with"))


def test_wish_is_fulfilled_once_and_counted(keeper: PromptKeeper, connection: Any) -> None:
    keeper.keep(wish(parts=2))
    assert counts(keeper) == {"kept_blocks": 6}
    assert connection.client.asked == [("a", 3), ("a", 3)]
    assert keeper.take_counts() == {}


def test_what_is_not_stored_yet_is_asked_for_again(keeper: PromptKeeper, connection: Any) -> None:
    connection.client.stored = 1
    keeper.keep(wish())
    eventually(lambda: len(connection.client.asked) > 1, "it asks again")
    connection.client.stored = 3
    assert counts(keeper) == {"kept_blocks": 3}


def test_what_is_not_stored_in_time_is_left_out(keeper: PromptKeeper, connection: Any) -> None:
    connection.client.stored = 1
    late = wish()
    late.until_s = time.monotonic()
    keeper.keep(late)
    assert counts(keeper) == {"kept_blocks": 1}


def test_daemon_that_comes_in_time_is_asked(keeper: PromptKeeper, connection: Any) -> None:
    client, connection.client = connection.client, None
    keeper.keep(wish())
    assert client.asked == []
    connection.client = client
    assert counts(keeper) == {"kept_blocks": 3}


@pytest.mark.parametrize(
    "error", [kvw.CapacityError("full", code="keeps_full"), ValueError("a bug")]
)
def test_refusal_is_counted_and_the_next_wish_is_heard(
    keeper: PromptKeeper, connection: Any, error: Exception
) -> None:
    connection.client.error = error
    keeper.keep(wish("refused"))
    assert counts(keeper) == {"keep_failures": 1}
    connection.client.error = None
    keeper.keep(wish("next"))
    assert counts(keeper) == {"kept_blocks": 3}


def test_nobody_waits_and_the_oldest_wishes_are_given_up_beyond_the_bound(
    keeper: PromptKeeper, connection: Any
) -> None:
    connection.client.may_answer.clear()
    keeper.keep(wish("first"))
    eventually(lambda: connection.client.asked, "it is asked for")
    for number in range(prompt_keeper._MOST_WISHES + 5):
        keeper.keep(wish(str(number)))
    assert counts(keeper) == {"keep_failures": 5}
    connection.client.may_answer.set()
    names = [str(number) for number in range(5, prompt_keeper._MOST_WISHES + 5)]
    eventually(lambda: len(connection.client.asked) == 1 + len(names), "all others are heard")
    assert [name for name, _ in connection.client.asked] == ["first", *names]


def test_closed_keeper_takes_no_wish(connection: Any) -> None:
    keeper = PromptKeeper(connection)
    keeper.close()
    keeper.keep(wish())
    keeper.close()
    assert connection.client.asked == []

"""What an engine's requests wish to be kept: asked for until it is there, and never waited for."""

from __future__ import annotations

import threading
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
        self.removed: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def keep(self, space: bytes, *, keys: Any, ttl_s: float, name: str) -> Keep:
        self.asked.append((name, len(keys)))
        self.may_answer.wait()
        if self.error is not None:
            raise self.error
        pages = min(self.stored, len(keys))
        return Keep(name, space, "m", pages, 8 * pages, ttl_s, ttl_s, renewed=False)

    def remove_keep(self, name: str, space: bytes) -> int:
        self.removed.append(name)
        return 1


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


def test_what_is_not_stored_in_time_is_left_out(
    keeper: PromptKeeper, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_keeper, "_PAUSES_S", (0.01, 0.01, 0.01, 0.01))
    connection.client.stored = 1
    keeper.keep(wish())
    assert counts(keeper) == {"kept_blocks": 1}
    assert len(connection.client.asked) == 3, "the third found no more than the second"


def test_wish_of_which_nothing_is_stored_is_a_failure(
    keeper: PromptKeeper, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_keeper, "_PAUSES_S", (0.01, 0.01, 0.01, 0.01))
    connection.client.stored = 0
    keeper.keep(wish())
    assert counts(keeper) == {"keep_failures": 1}
    connection.client = None
    keeper.keep(wish())
    assert counts(keeper) == {"keep_failures": 1}


def test_later_wish_takes_the_place_of_one_that_waits(
    keeper: PromptKeeper, connection: Any
) -> None:
    connection.client.stored = 2
    keeper.keep(wish("session", keys=5))
    eventually(lambda: len(connection.client.asked) > 1, "it waits for more")
    connection.client.stored = 3
    keeper.keep(wish("session", keys=3))
    assert counts(keeper) == {"kept_blocks": 3}
    assert connection.client.asked[-1] == ("session", 3)
    asked = len(connection.client.asked)
    keeper.keep(wish("other"))
    counts(keeper)
    assert len(connection.client.asked) == asked + 1, "the first one asks no more"


def test_wish_is_refused_whole_and_what_was_kept_of_it_is_let_go(
    keeper: PromptKeeper, connection: Any
) -> None:
    client = connection.client
    keep = client.keep

    def second_is_refused(*args: Any, **options: Any) -> Keep:
        if client.asked:
            raise kvw.CapacityError("full", code="keeps_full")
        return keep(*args, **options)  # type: ignore[no-any-return]

    client.keep = second_is_refused
    keeper.keep(wish(parts=2))
    assert counts(keeper) == {"keep_failures": 1}
    eventually(lambda: client.removed == ["a"], "the first part is let go")


def test_busy_daemon_is_asked_again(keeper: PromptKeeper, connection: Any) -> None:
    connection.client.error = kvw.CapacityError("busy", code="too_many_calls")
    keeper.keep(wish())
    eventually(lambda: len(connection.client.asked) > 1, "it asks again")
    connection.client.error = None
    assert counts(keeper) == {"kept_blocks": 3}


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
    assert counts(keeper) == {"keep_failures": 6}
    connection.client.may_answer.set()
    names = [str(number) for number in range(5, prompt_keeper._MOST_WISHES + 5)]
    eventually(lambda: len(connection.client.asked) == 1 + len(names), "all others are heard")
    assert [name for name, _ in connection.client.asked] == ["first", *names]


def test_keys_of_all_wishes_are_bounded(
    keeper: PromptKeeper, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_keeper, "_MOST_KEYS", 10)
    connection.client.may_answer.clear()
    for name in ("a", "b", "c", "d"):
        keeper.keep(wish(name))
    assert counts(keeper) == {"keep_failures": 1}
    keeper.keep(wish("too long", keys=11))
    assert counts(keeper) == {"keep_failures": 4}
    connection.client.may_answer.set()


def test_closed_keeper_takes_no_wish(connection: Any) -> None:
    keeper = PromptKeeper(connection)
    keeper.close()
    keeper.keep(wish())
    keeper.close()
    assert connection.client.asked == []

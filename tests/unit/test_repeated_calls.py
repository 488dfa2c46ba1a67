"""A call that no daemon answered is made once more: within its own time, and over a new connection
that stays where a daemon answers on it. Both clients, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
import pytest

from kvwarehouse.aio.life import Life
from kvwarehouse.aio.rpc import AsyncChannel
from kvwarehouse.client import endpoint
from kvwarehouse.client.endpoint import Credentials, parse_address
from kvwarehouse.client.rpc import Channel
from kvwarehouse.errors import TransportError, UsageError, WarehouseError

ADDRESS = parse_address("127.0.0.1:9")
GONE = grpc.StatusCode.UNAVAILABLE
REFUSED = grpc.StatusCode.INVALID_ARGUMENT

Tries: TypeAlias = Callable[[Any, Any], str]
Attempt: TypeAlias = Callable[[Tries, float], tuple[str, Any]]


class Ended(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode) -> None:
        self.code = lambda: status


class HandClock:
    """In the place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "check_listeners", lambda address: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    for module in ("client", "aio"):
        monkeypatch.setattr(f"kvwarehouse.{module}.rpc.time", clock)
    return clock


def attempt_blocking(tries: Tries, timeout_s: float) -> tuple[str, Any]:
    channel = Channel(ADDRESS, Credentials(), 60.0)
    try:
        answer = channel._attempt(lambda stub, budget: tries(channel._channel, budget), timeout_s)
        return answer, channel._channel
    except WarehouseError as error:
        error.add_note("kept" if channel._channel is not None else "forgotten")
        raise
    finally:
        channel.close()


def attempt_asyncio(tries: Tries, timeout_s: float) -> tuple[str, Any]:
    async def run() -> tuple[str, Any]:
        channel = AsyncChannel(ADDRESS, Credentials(), 60.0, Life())

        async def invoke(given: Any, budget: Any) -> str:
            return tries(given, budget)

        try:
            return await channel._attempt(invoke, timeout_s), channel._channel
        except WarehouseError as error:
            error.add_note("kept" if channel._channel is not None else "forgotten")
            raise
        finally:
            await channel.close()

    return asyncio.run(run())


@pytest.fixture(params=[attempt_blocking, attempt_asyncio], ids=["blocking", "asyncio"])
def attempt(request: pytest.FixtureRequest) -> Attempt:
    made: Attempt = request.param
    return made


def test_second_attempt_has_what_the_first_has_left(attempt: Attempt, clock: HandClock) -> None:
    """A call of 5 s took 9.5 s: its connection was lost after 4.5, and it began anew."""
    given: list[float] = []

    def tries(channel: Any, budget: Any) -> str:
        given.append(budget["timeout"])
        if len(given) == 1:
            clock.now_s += 4.5
            raise Ended(GONE)
        return "answer"

    assert attempt(tries, 5.0)[0] == "answer"
    assert given == [5.0, 0.5]


def test_call_without_time_for_a_second_attempt_fails_as_the_first_did(
    attempt: Attempt, clock: HandClock
) -> None:
    tried: list[Any] = []

    def tries(channel: Any, budget: Any) -> str:
        tried.append(channel)
        clock.now_s += 5.0
        raise Ended(GONE)

    with pytest.raises(TransportError) as caught:
        attempt(tries, 5.0)
    assert caught.value.code == "unavailable"
    assert len(tried) == 1


@pytest.mark.parametrize("second", ["answer", REFUSED, GONE])
def test_new_connection_stays_unless_nobody_answers_on_it(attempt: Attempt, second: Any) -> None:
    """One whose namespace was unknown cut all others under way on the new connection."""
    tried: list[Any] = []

    def tries(channel: Any, budget: Any) -> str:
        tried.append(channel)
        if len(tried) == 1:
            raise Ended(GONE)
        if second == "answer":
            return "answer"
        raise Ended(second)

    if second == "answer":
        assert attempt(tries, 5.0)[1] is tried[1]
    else:
        expected = UsageError if second is REFUSED else TransportError
        with pytest.raises(expected) as caught:
            attempt(tries, 5.0)
        assert caught.value.__notes__ == ["kept" if second is REFUSED else "forgotten"]
    assert tried[0] is not tried[1]


class UnderWay:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_call_without_an_answer_leaves_others_on_its_connection_alone() -> None:
    """They hear themselves that it is lost, and are made once more. The first to hear it cut the
    others, and those failed as "cancelled"."""

    async def run() -> None:
        channel, other = AsyncChannel(ADDRESS, Credentials(), 60.0, Life()), UnderWay()
        tried: list[Any] = []

        async def invoke(given: Any, budget: Any) -> str:
            tried.append(given)
            channel._calls[other] = tried[0]
            if len(tried) == 1:
                raise Ended(GONE)
            return "answer"

        assert await channel._attempt(invoke, 5.0) == "answer"
        assert not other.cancelled
        await channel.close()
        assert other.cancelled

    asyncio.run(run())

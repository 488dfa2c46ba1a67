"""How long a call may wait for its client. Over a clock of the test."""

from __future__ import annotations

import io
import json
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.repeats import TOLD_EVERY_S
from kvwarehouse.daemon.watchdog import FIRST_S, PACE_BYTES_S, STALL_S, Watchdog, Watched
from kvwarehouse_bench.harness.eventually import eventually


class Call:
    """What a watchdog does to one, and its time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cancelled = False
        self.log = io.StringIO()
        self.watchdog = Watchdog(Log("json", self.log), clock=lambda: self.now_s)
        # It looks when the test has it look: its own thread would beside it, and count twice.
        self.watchdog._thread = threading.current_thread()

    def cancel(self) -> None:
        self.cancelled = True

    def waits(self, stream: Watched, seconds: float) -> bool:
        """Whether it is ended where its client lets it wait for so long."""
        with stream.client_turn():
            self.now_s += seconds
            self.watchdog.look()
        return self.cancelled


@pytest.fixture
def call() -> Call:
    return Call()


def watched(call: Any) -> Any:
    return call.watchdog.watch(call, Deadline(3600), "/m/Store")


@pytest.mark.parametrize(("seconds", "ended"), [(FIRST_S - 1, False), (FIRST_S + 1, True)])
def test_first_message_has_a_deadline_of_the_daemon(
    call: Call, seconds: float, *, ended: bool
) -> None:
    with watched(call) as stream:
        assert call.waits(stream, seconds) is ended


@pytest.mark.parametrize(("bytes_s", "ended"), [(1, True), (PACE_BYTES_S, False)])
def test_stream_that_trickles_is_ended_and_a_slow_one_is_not(
    call: Call, bytes_s: int, *, ended: bool
) -> None:
    with watched(call) as stream:
        stream.heard(1)
        for _ in range(100):
            call.waits(stream, 1.0)
            stream.heard(bytes_s)
        assert call.cancelled is ended


def test_fast_stream_saves_no_patience_up(call: Call) -> None:
    with watched(call) as stream:
        for _ in range(10):
            stream.heard(1 << 30)
        assert not call.waits(stream, STALL_S - 1)
        assert call.waits(stream, 2)


def test_client_has_the_whole_time_for_each_message_it_takes(call: Call) -> None:
    with watched(call) as stream:
        stream.heard(1)
        for _ in range(10):
            assert not call.waits(stream, STALL_S - 1)
            stream.told()
        assert call.waits(stream, STALL_S + 1)


def test_wait_for_the_daemon_is_not_the_clients(call: Call) -> None:
    with watched(call) as stream:
        stream.heard(1)
        call.now_s += 100 * STALL_S
        assert not call.waits(stream, STALL_S - 1)


@pytest.mark.parametrize(("seconds", "ended"), [(STALL_S - 1, False), (STALL_S + 1, True)])
def test_client_has_a_time_to_take_what_was_said_last(
    call: Call, seconds: float, *, ended: bool
) -> None:
    answer = call.watchdog.leaving(call, "/m/Lookup")  # type: ignore[arg-type]
    call.now_s += seconds
    call.watchdog.look()
    assert call.cancelled is ended
    call.watchdog.forget(answer)


def test_answer_that_was_taken_is_watched_no_more(call: Call) -> None:
    call.watchdog.forget(call.watchdog.leaving(call, "/m/Lookup"))  # type: ignore[arg-type]
    call.now_s += 2 * STALL_S
    call.watchdog.look()
    assert not call.cancelled


def test_watchdog_without_a_thread_begins_with_the_next_call(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of processes: calls go on, and are watched again when there is a thread."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    call.watchdog._thread = None
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refused)
        answer = call.watchdog.leaving(call, "/m/Lookup")  # type: ignore[arg-type]
    call.now_s += 2 * STALL_S
    call.watchdog.forget(call.watchdog.leaving(call, "/m/Lookup"))  # type: ignore[arg-type]
    eventually(lambda: call.cancelled, "what stands still is ended")
    call.watchdog.forget(answer)


def test_streams_that_are_ended_are_told_at_a_bounded_rate_and_none_is_left_out(call: Call) -> None:
    """Incident: forty calls that stood still at once were forty lines."""

    def told() -> list[tuple[str, str, int]]:
        lines = [json.loads(line) for line in call.log.getvalue().splitlines()]
        return [(line["method"], line["why"], line["count"]) for line in lines]

    def stall(method: str, count: int) -> None:
        with ExitStack() as stack:
            for _ in range(count):
                stream = stack.enter_context(
                    call.watchdog.watch(call, Deadline(3600), method)  # type: ignore[arg-type]
                )
                stream.said_last()
            call.now_s += STALL_S + 1
            call.watchdog.look()

    stall("/m/Store", 40)
    assert told() == [("/m/Store", "stalled", 40)]
    at = call.now_s
    leaving = [call.watchdog.leaving(call, "/m/Store") for _ in range(3)]  # type: ignore[arg-type]
    for stream in leaving:
        stream._patience_s = 1.0
        call.now_s += 2.0
        call.watchdog.look()
    assert call.now_s < at + TOLD_EVERY_S
    assert len(told()) == 1
    call.now_s = at + TOLD_EVERY_S
    call.watchdog.tell()
    call.watchdog.tell()
    assert told()[1:] == [("/m/Store", "stalled", 3)]

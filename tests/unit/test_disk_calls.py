"""Calls to a disk that hangs are given up in time, and only one waits for it."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from kvwarehouse.daemon.disk_calls import DiskCalls, LateDiskError
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually


def fail(error: BaseException) -> None:
    raise error


def test_call_gives_what_it_returns_or_raises() -> None:
    calls = DiskCalls(DEADLINE_S)
    assert calls.wait_for(lambda: 7) == 7
    for error in (TimeoutError("its own"), OSError("no"), SystemExit(3)):
        with pytest.raises(type(error)) as caught:
            calls.wait_for(partial(fail, error))
        assert caught.value is error


def test_late_call_keeps_others_from_beginning_until_it_has_ended() -> None:
    calls, answers, begun = DiskCalls(0.01), threading.Event(), []

    def hang() -> int:
        begun.append(1)
        assert answers.wait(DEADLINE_S)
        return 1

    for _ in range(3):
        with pytest.raises(LateDiskError, match=r"has not answered within 0\.01 s"):
            calls.wait_for(hang)
    assert len(begun) == 1
    answers.set()

    def answered() -> bool:
        try:
            return calls.wait_for(lambda: True)
        except LateDiskError:
            return False

    assert eventually(answered, "the late call has ended")

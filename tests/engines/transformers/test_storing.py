"""Stores behind the prompt's back: bounded, counted, finished before the end."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

from kvwarehouse_connectors.transformers.storing import StoreJobs
from kvwarehouse_connectors.transformers.transfer import Stored


@pytest.fixture
def done() -> list[Stored | None]:
    return []


def test_job_beyond_the_bound_is_refused_and_not_waited_for(done: list[Stored | None]) -> None:
    gate = threading.Event()

    def job() -> Stored:
        gate.wait(60)
        return Stored(1)

    queue = StoreJobs(2, done.append)
    assert [queue.put(job) for _ in range(3)] == [True, True, False]
    gate.set()
    assert queue.flush(60)
    assert queue.put(job)
    queue.close()
    assert done == [Stored(1)] * 3


def test_flush_says_when_its_time_ran_out(done: list[Stored | None]) -> None:
    gate = threading.Event()
    queue = StoreJobs(1, done.append)
    queue.put(lambda: Stored(int(gate.wait(60))))
    assert queue.flush(0.0) is False
    gate.set()
    queue.close()
    assert done == [Stored(1)]


def test_failed_job_is_reported_and_the_next_one_runs(done: list[Stored | None]) -> None:
    def fails() -> Stored:
        raise OSError("disk on fire")

    queue = StoreJobs(2, done.append)
    queue.put(fails)
    queue.put(lambda: Stored(1))
    queue.close()
    assert done == [None, Stored(1)]


@pytest.mark.parametrize("ended", [False, True], ids=["while it waits", "before it is called"])
def test_flush_says_once_that_a_store_failed(done: list[Stored | None], ended: bool) -> None:
    gate, over = threading.Event(), threading.Event()

    def fails() -> Stored:
        gate.wait(0 if ended else 0.2)
        raise OSError("disk on fire")

    def last(stored: Stored | None) -> None:
        done.append(stored)
        over.set()

    queue = StoreJobs(2, last)
    assert queue.put(fails)
    if ended:
        assert over.wait(60)
    assert queue.flush(60) is False
    assert queue.put(lambda: Stored(1))
    assert queue.flush(60)
    queue.close()
    assert done == [None, Stored(1)]


def test_closed_queue_refuses_jobs(done: list[Stored | None]) -> None:
    queue = StoreJobs(1, done.append)
    queue.close()
    assert queue.put(Stored) is False

"""Whatever becomes of the daemon, of a chunk, or of vLLM's requests: each job is reported once and
in time, what is said to be loaded is what was stored, and rows are left alone after the report."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm_tier import tier_core
from kvwarehouse_connectors.vllm_tier.jobs import Job, JobOutcome
from kvwarehouse_connectors.vllm_tier.tier_core import LookupAnswer
from testkit.damage import find, find_one
from vllm_tier_model.primary import FACTS, Primary, keys

HERE, THERE = range(4), range(100, 104)
_SUPPORT = Path(__file__).parents[2] / "support"
_VANISHES = """
import os, sys
from vllm_tier_model.primary import FACTS, Primary, keys
primary = Primary(sys.argv[1], salt="vanishes", store_timeout_s=120)
named = keys("vanishes")
primary.fill(range(4), 1)
primary.core.begin("r", FACTS)
assert primary.store("r", named, range(4))
chunks = primary.core._chunks(primary.core._requests["r"], zip(named, range(4)))
assert primary.core._pages.hold(chunks)
os._exit(0)
"""


def stored(primary: Primary, *name: object) -> tuple[list[bytes], list[bytes]]:
    """Keys of four chunks that are stored, and their bytes. The request "r" is begun for it."""
    named = keys(*name)
    source = primary.fill(HERE, random.Random(repr(name)).getrandbits(32))
    primary.core.begin("r", FACTS)
    assert primary.store("r", named, HERE)
    return named, source


def assert_loaded(
    primary: Primary, request: str, named: Sequence[bytes], source: Sequence[bytes]
) -> None:
    """All of them, and their bytes."""
    assert primary.load(request, named, THERE) == [True] * len(named)
    assert primary.contents(THERE) == source


def only_on_nvme(serving: Serving) -> None:
    with serving.connect() as client:
        assert client.flush().pending == 0
        client.evict(None, 1000)


class Gate:
    """Holds the threads that make jobs, so that a test decides when they go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, primary: Primary, name: str) -> None:
        make: Callable[..., Any] = getattr(primary.core._pages, name)
        self.entered, self._open = threading.Semaphore(0), threading.Event()

        def held(job: Any, *more: Any) -> Any:
            self.entered.release()
            assert self._open.wait(DEADLINE_S)
            return make(job, *more)

        monkeypatch.setattr(primary.core._pages, name, held)

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=DEADLINE_S)

    def open(self) -> None:
        self._open.set()


# -- the daemon ------------------------------------------------------------------------------------


def test_without_a_daemon_all_is_a_miss_and_one_that_comes_is_found(
    start: Any, serving: Serving, seed: int
) -> None:
    serving.kill()
    primary, named = start(serving.address, connected=False), keys(seed)
    source = primary.fill(HERE, seed)
    primary.core.begin("r", FACTS)
    assert primary.lookup("r", named) == [LookupAnswer.MISS] * 4
    assert not primary.store("r", named, HERE)
    assert primary.load("r", named, THERE) == [False] * 4
    serving.start()
    eventually(lambda: primary.store("r", named, HERE), "a store at the new daemon")
    primary.core.begin("next", FACTS)
    assert primary.found("next", named) == [True] * 4
    assert_loaded(primary, "next", named, source)


def test_chunks_outlive_a_killed_daemon_and_are_stored_at_the_next(
    start: Any, serving: Serving, seed: int
) -> None:
    primary = start(serving.address)
    named, source = stored(primary, seed)
    serving.kill()
    eventually(lambda: not primary.store("r", keys(seed, "new"), HERE), "a store that is refused")
    loaded = primary.load("r", named, THERE)
    kept = [place for place, came in enumerate(loaded) if came]
    assert [primary.contents(THERE)[i] for i in kept] == [source[i] for i in kept]
    serving.start()

    def comes() -> bool:
        primary.core.begin("r", FACTS)  # a chunk that did not come once is a miss for its request
        return all(primary.load("r", named, THERE))

    eventually(comes, "a load from the next daemon")
    assert primary.contents(THERE) == source
    eventually(lambda: primary.store("r", keys(seed, "new"), HERE), "a store at the next one")


def test_stopped_daemon_serves_what_is_in_dram_and_is_not_waited_for(
    start: Any, silence_counts: Any, serving: Serving, seed: int
) -> None:
    """The bounds of jobs are far off: who waits for them fails."""
    primary = start(serving.address)
    far, far_source = stored(primary, seed, "far")
    only_on_nvme(serving)
    near, source = stored(primary, seed, "near")
    silence_counts()
    serving.pause()
    try:
        # What was begun before the engine knows, and what comes after.
        assert primary.found("r", far) == [False] * 4
        assert primary.found("r", near) == [True] * 4
        assert_loaded(primary, "r", near, source)
        assert primary.load("r", far, THERE) == [False] * 4
        assert not primary.store("r", keys(seed, "new"), HERE)
    finally:
        serving.resume()

    def comes() -> bool:
        primary.core.begin("r", FACTS)
        return all(primary.found("r", far)) and all(primary.load("r", far, THERE))

    eventually(comes, "chunks from NVMe")
    assert primary.contents(THERE) == far_source


def test_warehouse_that_was_emptied_beneath_is_registered_at_anew(
    start: Any, serving: Serving, seed: int
) -> None:
    primary = start(serving.address)
    named, source = stored(primary, seed)
    serving.kill()
    serving.lose_arena()
    for file in [*serving.nvme_dir.rglob("*")]:
        if file.is_file():
            file.unlink()
    serving.start()
    eventually(lambda: primary.store("r", named, HERE), "a store at the empty warehouse")
    assert_loaded(primary, "r", named, source)


# -- NVMe ------------------------------------------------------------------------------------------


def test_chunks_on_nvme_are_asked_for_again_until_they_have_come_and_are_held(
    start: Any, serving: Serving, seed: int
) -> None:
    primary = start(serving.address)
    named, source = stored(primary, seed)
    only_on_nvme(serving)
    assert primary.lookup("r", named) == [LookupAnswer.COMING] * 4
    assert primary.found("r", named) == [True] * 4
    with serving.connect() as client:
        client.evict(None, 1000)
        assert primary.lookup("r", named) == [LookupAnswer.HIT] * 4
        assert_loaded(primary, "r", named, source)
        assert client.status()["core"]["pins"]["held"] == 0


def test_pins_of_what_was_fetched_end_with_the_request(
    start: Any, serving: Serving, seed: int
) -> None:
    primary = start(serving.address)
    named, _ = stored(primary, seed)
    only_on_nvme(serving)
    assert primary.found("r", named) == [True] * 4
    with serving.connect() as client:
        assert client.status()["core"]["pins"]["held"] == 4
        primary.core.end("r")
        assert client.status()["core"]["pins"]["held"] == 0


def test_request_that_ends_while_chunks_come_holds_none(
    start: Any, serving: Serving, seed: int
) -> None:
    """Also where nothing else is to be done: vLLM is asked to go on until they are given back."""
    primary = start(serving.address)
    named, _ = stored(primary, seed)
    only_on_nvme(serving)
    assert primary.lookup("r", named) == [LookupAnswer.COMING] * 4
    primary.core.step_ends()
    primary.core.end("r")

    def stepped() -> bool:
        if primary.core.pending:
            primary.poll()
        return not primary.core.pending

    with serving.connect() as client:
        eventually(stepped, "a tier for which vLLM need not go on")
        assert client.status()["core"]["pins"]["held"] == 0


def test_chunk_that_leaves_dram_again_is_not_fetched_for_ever(
    start: Any, serving: Serving, seed: int
) -> None:
    """A warehouse too small for what is asked of it: asked again in each step, a request would
    neither load nor compute."""
    primary = start(serving.address)
    named, _ = stored(primary, seed)
    only_on_nvme(serving)
    assert primary.found("r", named) == [True] * 4
    for pins in primary.core._requests["r"].pins:
        pins.release()
    only_on_nvme(serving)
    assert primary.lookup("r", named) == [LookupAnswer.MISS] * 4


def test_wait_for_nvme_ends_by_its_bound_whatever_the_disk_does(
    start: Any, serving: Serving, seed: int
) -> None:
    """Also of those who wait behind others for a thread that fetches."""
    primary = start(serving.address, load_timeout_s=0.2)
    named, _ = stored(primary, seed)
    only_on_nvme(serving)
    go_on = threading.Event()

    def stuck(job: Job) -> JobOutcome:
        assert go_on.wait(DEADLINE_S)
        return JobOutcome(job, [])

    primary.core._fetches._make = stuck
    waiting = [f"r{number}" for number in range(tier_core._FETCH_THREADS + 1)]
    for request in waiting:
        primary.core.begin(request, FACTS)
        assert primary.lookup(request, named) == [LookupAnswer.COMING] * 4
    primary.core.step_ends()
    for request in waiting:
        assert primary.found(request, named) == [False] * 4
    go_on.set()


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_damaged_chunk_is_a_miss_for_its_request_and_the_others_come(
    start: Any, serving: Serving, seed: int, tier: str
) -> None:
    """Asked for again and again it would hold the request up for ever (vLLM's issue 49176)."""
    primary = start(serving.address)
    named, source = stored(primary, seed)
    page = np.frombuffer(source[1], np.uint8)
    if tier == "nvme":
        only_on_nvme(serving)
        for place in find(serving.segments, page):
            place.flip(1, at=77)
    else:
        with serving.connect() as client:
            assert client.flush().pending == 0
        for place in find(serving.segments, page):
            place.flip(1, at=77)
        find_one([serving.arena_dir / "arena"], page).flip(3, at=5000)
    primary.found("r", named)
    assert primary.load("r", named, THERE) == [True, False, True, True]
    assert [primary.contents(THERE)[i] for i in (0, 2, 3)] == [source[i] for i in (0, 2, 3)]
    assert primary.lookup("r", named)[1] is LookupAnswer.MISS
    primary.core.begin("next", FACTS)
    eventually(lambda: not all(primary.found("next", named)), "the chunk taken out")
    assert primary.store("r", named, HERE)
    primary.core.begin("last", FACTS)
    assert primary.found("last", named) == [True] * 4
    assert_loaded(primary, "last", named, source)


# -- jobs ------------------------------------------------------------------------------------------


def test_load_of_a_request_that_has_ended_fails_and_writes_nothing(
    start: Any, shared: Serving, seed: int
) -> None:
    """vLLM submits a step's loads after it has aborted requests. A job without chunks must not pass
    for one that is complete."""
    primary = start(shared.address)
    named, _ = stored(primary, seed)
    primary.core.end("r")
    before = primary.rows[THERE].copy()
    assert primary.load("r", named, THERE) == [False] * 4
    assert not primary.store("r", keys(seed, "new"), HERE)
    assert (primary.rows[THERE] == before).all()


@pytest.mark.parametrize("polled", [True, False])
@pytest.mark.parametrize("kind", ["load", "store"])
def test_job_that_waits_too_long_fails_and_is_never_begun(
    start: Any, shared: Serving, seed: int, kind: str, polled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether vLLM asks first, and is told so, or a thread comes to it first."""
    primary = start(shared.address)
    named, _ = stored(primary, seed)
    before = primary.rows[THERE].copy()
    gate = Gate(monkeypatch, primary, kind)
    begin = primary.begin_load if kind == "load" else primary.begin_store
    threads = tier_core._LOAD_THREADS if kind == "load" else 1
    running = [begin("r", named, range(120 + 4 * n, 124 + 4 * n)) for n in range(threads)]
    for _ in running:
        gate.wait_entered()
    waiting = begin("r", named, THERE)
    jobs = primary.core._loads if kind == "load" else primary.core._stores
    (late,) = jobs._waiting
    late.until_s = time.monotonic()
    if polled:
        primary.poll()
        assert not primary.reported[waiting].complete
    assert not any(number in primary.reported for number in running), "their threads go on"
    gate.open()
    eventually(lambda: not jobs._waiting, "a thread that came to it")
    for number in (*running, waiting):
        primary.ended(number)
    assert not primary.reported[waiting].done
    assert gate.entered.acquire(blocking=False) is False, "the late job was begun"
    assert (primary.rows[THERE] == before).all()


def test_chunk_that_did_not_come_is_not_found_again_by_its_request(
    start: Any, shared: Serving, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is there, and nobody takes it out, the request would be held up for ever by
    loads of it (vLLM's issue 49176)."""
    primary = start(shared.address)
    named, source = stored(primary, seed)
    monkeypatch.setattr(primary.core._pages, "_load", lambda *_: kvw.Loaded(0, {"damaged": 1}))
    assert primary.load("r", named, THERE) == [False] * 4
    monkeypatch.undo()
    assert primary.lookup("r", named) == [LookupAnswer.MISS] * 4
    primary.core.begin("next", FACTS)
    assert primary.lookup("next", named) == [LookupAnswer.HIT] * 4
    assert_loaded(primary, "next", named, source)


def test_load_that_runs_is_reported_only_when_nothing_writes_any_more(
    start: Any, shared: Serving, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it is: vLLM gives its rows to others as soon as it hears of it."""
    primary = start(shared.address)
    named, source = stored(primary, seed)
    writing, go_on = threading.Event(), threading.Event()
    load = primary.core._pages._load

    def late(*arguments: Any) -> kvw.Loaded:
        writing.set()
        assert go_on.wait(DEADLINE_S)
        loaded: kvw.Loaded = load(*arguments)
        return loaded

    monkeypatch.setattr(primary.core._pages, "_load", late)
    number = primary.begin_load("r", named, THERE)
    assert writing.wait(DEADLINE_S)
    job(primary).until_s = time.monotonic()
    primary.poll()
    assert number not in primary.reported
    go_on.set()
    outcome = primary.ended(number)
    assert len(outcome.done) == 4, "what was copied in its last call came"
    assert primary.contents(THERE) == source


def job(primary: Primary) -> Any:
    (running,) = primary.core._loads._running
    return running


def test_jobs_beyond_the_queue_fail_at_once(
    start: Any, shared: Serving, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_core, "_MOST_WAITING", 4)
    primary = start(shared.address)
    named, _ = stored(primary, seed)
    gate = Gate(monkeypatch, primary, "store")
    first = primary.begin_store("r", named, HERE)
    gate.wait_entered()
    waiting = [primary.begin_store("r", keys(seed, n), HERE) for n in range(4)]
    refused = primary.begin_store("r", keys(seed, "more"), HERE)
    primary.poll()
    assert set(primary.reported) & {first, *waiting, refused} == {refused}
    assert primary.core.totals["dropped.queue_full"] == 4
    gate.open()
    for number in (first, *waiting):
        assert primary.ended(number).complete


def test_job_that_raises_is_reported_as_failed(
    start: Any, shared: Serving, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary = start(shared.address)
    named, _ = stored(primary, seed)

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("broken")

    for name in ("load", "store"):
        monkeypatch.setattr(primary.core._pages, name, fail)
    assert primary.load("r", named, THERE) == [False] * 4
    assert not primary.store("r", named, HERE)
    monkeypatch.setattr(primary.core._pages, "hold", fail)
    assert primary.load("r", named, THERE) == [False] * 4, "it fails before it is queued"
    assert not primary.store("r", [key[:-1] + b"\x09" for key in named], HERE), "no such group"


# -- the engine's life -----------------------------------------------------------------------------


def test_drain_ends_every_job_and_waits_for_those_that_run(
    start: Any, shared: Serving, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary = start(shared.address)
    named, _ = stored(primary, seed)
    gate = Gate(monkeypatch, primary, "load")
    running = [
        primary.begin_load("r", named, range(120 + 4 * n, 124 + 4 * n))
        for n in range(tier_core._LOAD_THREADS)
    ]
    for _ in running:
        gate.wait_entered()
    waiting = primary.begin_load("r", named, THERE)
    drained = threading.Thread(target=primary.core.drain)
    drained.start()
    eventually(lambda: not primary.core._loads._waiting, "an end of the job that waits")
    assert drained.is_alive()
    gate.open()
    drained.join(DEADLINE_S)
    assert not drained.is_alive()
    primary.poll()
    assert {*running, waiting} <= set(primary.reported), "vLLM asserts that none is open"
    assert not primary.reported[waiting].complete


def test_nothing_that_was_stored_before_a_reset_is_loaded_by_this_engine_again(
    start: Any, shared: Serving, seed: int
) -> None:
    """A reset may have come with other weights: what this engine has stored under the old ones must
    not be taken for theirs, and what it stores from now on by nobody for the old ones'."""
    primary = start(shared.address)
    named, _ = stored(primary, seed)
    primary.core.drain()
    primary.poll()
    assert primary.lookup("r", named) == [LookupAnswer.MISS] * 4, "a request of before"
    assert primary.load("r", named, THERE) == [False] * 4
    assert not primary.store("r", keys(seed, "late"), HERE)
    primary.core.begin("after", FACTS)
    assert primary.lookup("after", named) == [LookupAnswer.MISS] * 4
    new = primary.fill(HERE, seed + 1)
    assert primary.store("after", named, HERE)
    assert primary.load("after", named, THERE) == [True] * 4
    assert primary.contents(THERE) == new
    other = start(shared.address)
    other.core.begin("r", FACTS)
    assert other.load("r", named, THERE) == [True] * 4
    assert other.contents(THERE) != new, "another engine finds what was stored before the reset"


def test_close_is_idempotent_and_fails_what_waits_and_what_comes(
    start: Any, shared: Serving, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary = start(shared.address)
    named, _ = stored(primary, seed)
    gate = Gate(monkeypatch, primary, "store")
    running = primary.begin_store("r", named, HERE)
    gate.wait_entered()
    waiting = primary.begin_store("r", keys(seed, "new"), HERE)
    closing = threading.Thread(target=primary.core.close)
    closing.start()
    eventually(lambda: primary.core._stores._closed, "the tier closes")
    gate.open()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    primary.core.close()
    primary.poll()
    assert {running, waiting} <= set(primary.reported)
    assert not primary.reported[waiting].complete
    assert primary.lookup("r", named) == [LookupAnswer.MISS] * 4
    assert not primary.store("r", named, HERE)


def test_tier_that_is_never_closed_leaves_no_pins_behind(
    start: Any, shared: Serving, seed: int
) -> None:
    """vLLM kills its engine's process after a few seconds: pins end with the process, and pages are
    sealed as they come. Here: a client that vanishes without a word."""
    subprocess.run(
        [sys.executable, "-P", "-c", _VANISHES, shared.address],
        check=True,
        env={**os.environ, "PYTHONPATH": str(_SUPPORT)},
        timeout=DEADLINE_S,
    )
    primary = start(shared.address, salt="vanishes")
    primary.core.begin("r", FACTS)
    assert primary.load("r", keys("vanishes"), THERE) == [True] * 4
    with shared.connect() as client:
        eventually(lambda: client.status()["core"]["pins"]["held"] == 0, "a warehouse without pins")

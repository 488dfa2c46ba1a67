"""Whatever becomes of the daemon, of a chunk, or of LMCache's requests: LMCache has an answer, a
miss or a chunk that was not stored, and what is said to be loaded is what was stored."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import Serving
from lmcache_model.objects import Memory, contents, filled, keys
from testkit.damage import find, find_one


def blank(count: int = 4, **fields: Any) -> list[Memory]:
    return [Memory(**fields) for _ in range(count)]


def test_without_a_daemon_there_are_answers_and_a_daemon_that_comes_is_found(
    start: Any, serving: Serving, seed: int
) -> None:
    serving.kill()
    server, named, source = start(serving.address), keys(seed), filled(seed)
    assert not server.store(named, source).complete
    assert server.lookup(named) == [False] * 4
    assert server.load(named, blank()) == [False] * 4
    status = server.core.status()
    assert not status["is_healthy"]
    assert status["problem"]
    assert status["totals"]["dropped.unreachable"] == 4
    serving.start()
    eventually(lambda: server.store(named, source).complete, "a store at the new daemon")
    assert server.prefetch(named, blank()) == [True] * 4
    assert server.core.status()["is_healthy"]


def test_chunks_outlive_a_killed_daemon_and_are_stored_at_the_next(
    start: Any, serving: Serving, seed: int
) -> None:
    server, named, source = start(serving.address), keys(seed), filled(seed)
    assert server.store(named, source).complete
    assert server.lookup(named) == [True] * 4
    serving.kill()
    eventually(
        lambda: not server.store(keys(seed + 1), filled(seed + 1)).complete, "a store is refused"
    )
    target = blank()
    loaded = server.load(named, target)
    assert [one for one, came in zip(contents(target), loaded, strict=True) if came] == [
        one for one, came in zip(contents(source), loaded, strict=True) if came
    ]
    serving.start()
    eventually(lambda: all(server.prefetch(named, target)), "a load from the next daemon")
    assert contents(target) == contents(source)
    eventually(
        lambda: server.store(keys(seed + 1), filled(seed + 1)).complete, "a store at the next one"
    )


def test_a_stopped_daemon_serves_what_is_in_dram_and_is_not_waited_for(
    start: Any, silence_counts: Any, serving: Serving, seed: int
) -> None:
    """The bounds of calls are far off: who waits for them fails."""
    server = start(serving.address)
    near, far, source = keys(seed), keys(seed + 1), filled(seed)
    assert server.store(far, source).complete
    with serving.connect() as client:
        assert client.flush().pending == 0
        client.evict(None, 100)
    assert server.store(near, source).complete
    silence_counts()
    serving.pause()
    try:
        eventually(lambda: not any(server.lookup(far)), "that the daemon is known to stand still")
        target = blank()
        assert server.prefetch(near, target) == [True] * 4
        assert contents(target) == contents(source)
        assert server.load(far, blank()) == [False] * 4
        assert not server.store(keys(seed + 2), source).complete
    finally:
        serving.resume()
    eventually(lambda: all(server.prefetch(far, target)), "chunks from NVMe")
    assert contents(target) == contents(source)


def test_a_warehouse_that_was_emptied_beneath_is_registered_at_anew(
    start: Any, serving: Serving, seed: int
) -> None:
    server, named, source = start(serving.address), keys(seed), filled(seed)
    assert server.store(named, source).complete
    serving.kill()
    serving.lose_arena()
    for file in [*serving.nvme_dir.rglob("*")]:
        if file.is_file():
            file.unlink()
    serving.start()
    eventually(lambda: server.store(named, source).size_bytes, "a store at the empty warehouse")
    target = blank()
    assert server.prefetch(named, target) == [True] * 4
    assert contents(target) == contents(source)


def test_a_chunk_damaged_in_dram_is_a_miss_and_those_behind_it_come(
    start: Any, shared: Serving, seed: int
) -> None:
    """Where there is no other copy on NVMe."""
    server, named, source = start(shared.address), keys(seed), filled(seed)
    assert server.store(named, source).complete
    find_one([shared.arena_dir / "arena"], source[1].bytes).flip(3, at=5000)
    target = blank()
    assert server.prefetch(named, target) == [True, False, True, True]
    assert [contents(target)[i] for i in (0, 2, 3)] == [contents(source)[i] for i in (0, 2, 3)]
    eventually(lambda: not all(server.lookup(named)), "the chunk taken out")
    eventually(
        lambda: server.store(named, source).complete and all(server.prefetch(named, target)),
        "the chunk stored again",
    )
    assert contents(target) == contents(source)


def test_a_chunk_damaged_on_nvme_is_a_miss(start: Any, serving: Serving, seed: int) -> None:
    server, named, source = start(serving.address), keys(seed), filled(seed)
    assert server.store(named, source).complete
    with serving.connect() as client:
        assert client.flush().pending == 0
        client.evict(None, 100)
    for place in find(serving.segments, source[2].bytes):
        place.flip(1, at=77)
    target = blank()
    assert server.prefetch(named, target) == [True, True, False, True]
    assert [contents(target)[i] for i in (0, 1, 3)] == [contents(source)[i] for i in (0, 1, 3)]


def test_locked_chunks_stay_in_dram_until_each_was_unlocked(
    start: Any, tmp_path: Path, seed: int
) -> None:
    with Serving(tmp_path, dram="16MiB") as serving, serving.connect() as client:
        server, named, source = start(serving.address), keys(seed), filled(seed)
        assert server.store(named, source).complete
        assert server.lookup(named) == [True] * 4
        assert server.lookup(named[:1]) == [True]
        client.evict(None, 1000, "all")
        target = blank()
        assert server.load(named, target) == [True] * 4
        assert contents(target) == contents(source)
        server.core.unlock(named)
        client.evict(None, 1000, "all")
        assert server.load(named, blank()) == [True, False, False, False], "of the second lookup"
        server.core.unlock(named[:1])
        client.evict(None, 1000, "all")
        assert server.load(named, blank()) == [False] * 4
        assert server.core.status()["locked_chunks"] == 0


@pytest.mark.parametrize("busy", [False, True])
def test_locks_that_lmcache_forgets_end_by_themselves(
    start: Any, shared: Serving, seed: int, busy: bool
) -> None:
    """Of a request that it gives up between lookup and answer. busy: others go on all the while."""
    server, named, other = start(shared.address, lock_timeout_s=1), keys(seed), keys(seed + 1)
    assert server.store(named, filled(seed)).complete
    assert server.lookup(named) == [True] * 4

    def ended() -> bool:
        if busy:
            server.lookup(other)
        locked: int = server.core.status()["locked_chunks"]
        return locked == 0

    eventually(ended, "the end of the locks")


def test_a_full_warehouse_keeps_the_newest_and_what_is_locked(
    start: Any, tmp_path: Path, seed: int
) -> None:
    """Six times as much as there is room for."""
    shape = {"shapes": [(2, 4, 256, 128)]}  # 512 KiB a chunk
    with Serving(tmp_path, dram="16MiB") as serving:
        server = start(serving.address)
        first, first_source = keys(seed), filled(seed, **shape)
        assert server.store(first, first_source).complete
        assert server.lookup(first, blank(**shape)) == [True] * 4
        for turn in range(1, 48):
            stored = server.store(keys(seed + turn), filled(seed + turn, **shape))
            assert stored.complete, server.totals()
        target = blank(**shape)
        assert server.prefetch(keys(seed + 47), target) == [True] * 4
        assert contents(target) == contents(filled(seed + 47, **shape))
        assert server.prefetch(keys(seed + 1), blank(**shape)) == [False] * 4
        assert server.load(first, target) == [True] * 4, "locked all the while"
        assert contents(target) == contents(first_source)


def test_locks_over_the_budget_of_pins_are_found_and_not_held(
    start: Any, tmp_path: Path, seed: int
) -> None:
    """A process may pin half the arena; the rest stays loadable, and evictable."""
    shape = {"shapes": [(2, 4, 256, 128)]}
    with Serving(tmp_path, dram="16MiB") as serving:
        server = start(serving.address)
        batches = [keys(seed + turn, 4) for turn in range(6)]
        for turn, named in enumerate(batches):
            assert server.store(named, filled(seed + turn, **shape)).complete
        for named in batches:
            assert server.lookup(named, blank(**shape)) == [True] * 4
        totals = server.totals()
        assert 0 < totals["held_chunks"] < totals["found_chunks"] == 24
        assert server.store(keys(seed + 9), filled(seed + 9, **shape)).complete, "there is room"
        for named in batches:
            server.core.unlock(named)
        assert server.lookup(keys(seed + 9), blank(**shape)) == [True] * 4
        assert server.totals()["held_chunks"] == totals["held_chunks"] + 4


def test_one_task_larger_than_what_may_be_reserved_at_once_is_stored(
    start: Any, tmp_path: Path, seed: int
) -> None:
    """Clients may have an eighth of the arena reserved: 2 MiB here, for a task of 6 MiB."""
    shape = {"shapes": [(2, 4, 256, 128)]}
    with Serving(tmp_path, dram="16MiB") as serving:
        server, named = start(serving.address), keys(seed, 12)
        source, target = filled(seed, 12, **shape), blank(12, **shape)
        assert server.store(named, source).complete, server.totals()
        assert server.prefetch(named, target) == [True] * 12
        assert contents(target) == contents(source)


def test_chunks_that_fit_no_slab_are_misses_and_the_server_goes_on(
    start: Any, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    large = {"shapes": [(32, 1 << 20)]}
    with Serving(tmp_path, dram="16MiB") as serving:
        server = start(serving.address)
        assert not server.store(keys(seed, 1), filled(seed, 1, **large)).complete
        assert server.lookup(keys(seed, 1), blank(1, **large)) == [False]
        assert str(64 << 20) in caplog.text
        assert server.store(keys(seed), filled(seed)).complete


def test_a_drained_daemon_takes_nothing_new(start: Any, serving: Serving, seed: int) -> None:
    server, named, source = start(serving.address), keys(seed), filled(seed)
    assert server.store(named[:2], source[:2]).complete
    with serving.connect() as client:
        client.drain()
    assert not server.store(named, source).complete
    assert server.prefetch(named, blank()) == [True, True, False, False]
    assert server.totals()["dropped.draining"] == 4
    assert server.store(named[:2], source[:2]).complete, "they are there"


def test_stores_beyond_the_queue_are_refused_at_once_and_its_room_comes_back(
    start: Any, silence_counts: Any, serving: Serving, seed: int
) -> None:
    shape = {"shapes": [(2, 4, 256, 128)]}
    server = start(serving.address, store_queue_bytes=1 << 20)
    assert server.store(keys(seed), filled(seed, **shape)).complete, "one is taken in any case"
    silence_counts()
    serving.pause()
    answers: queue.Queue[Any] = queue.Queue()
    try:
        for turn in range(1, 9):
            named, source = keys(seed + turn), filled(seed + turn, **shape)
            server.core.store(named, source, answers.put)
        eventually(lambda: answers.qsize() == 8, "all of them answered")
        assert not any(answers.get().complete for _ in range(8))
        assert server.totals()["dropped.queue_full"] >= 4
    finally:
        serving.resume()
    assert server.core.status()["queued_store_bytes"] == 0
    eventually(lambda: server.store(keys(seed + 1), filled(seed + 1, **shape)).complete, "a store")


def test_a_load_that_lmcache_gives_up_writes_no_more_once_it_is_unlocked(
    start: Any, serving: Serving, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache unlocks, then gives the memory to others, and says nothing else."""
    server, named, source = start(serving.address), keys(seed), filled(seed)
    assert server.store(named, source).complete
    assert server.lookup(named) == [True] * 4
    inside, go_on = threading.Event(), threading.Event()
    ask = type(server.core._chunk_store)._load_once
    turns = iter(range(99))

    def held_up(page_store: Any, batch: Any, load: Any, timeout_s: float) -> Any:
        """One chunk of the load; the others wait for what the test does."""
        if next(turns):
            inside.set()
            assert go_on.wait(DEADLINE_S)
            return ask(page_store, batch, load, timeout_s)
        return ask(page_store, batch.take(np.arange(1)), load, timeout_s)

    monkeypatch.setattr(type(server.core._chunk_store), "_load_once", held_up)
    monkeypatch.setattr("kvwarehouse_connectors.lmcache.page_store._CALL_KEYS", 1)
    target, answers = blank(), queue.Queue[Any]()
    server.core.load(named, target, answers.put)
    assert inside.wait(DEADLINE_S)
    server.core.unlock(named)
    go_on.set()
    assert answers.get(timeout=DEADLINE_S).tolist() == [True, False, False, False]
    assert not any(one.bytes.any() for one in target[1:])
    assert server.totals()["missed.given_up"] == 3


def test_an_unlock_of_another_request_ends_no_load(start: Any, shared: Serving, seed: int) -> None:
    server, named, source = start(shared.address), keys(seed), filled(seed)
    assert server.store(named, source).complete
    for _ in range(2):
        assert server.lookup(named) == [True] * 4
    load = server.core._loading.begin(named)
    server.core.unlock(named)
    assert load.writing(lambda: None)
    server.core.unlock(named)
    assert not load.writing(lambda: pytest.fail("its memory is given to others"))
    server.core._loading.done(load)


def test_closing_ends_with_calls_under_way_and_without_a_daemon(
    start: Any, silence_counts: Any, serving: Serving, seed: int
) -> None:
    server = start(serving.address)
    assert server.store(keys(seed), filled(seed)).complete
    assert server.lookup(keys(seed)) == [True] * 4
    silence_counts()
    serving.pause()
    try:
        kept = [filled(seed + turn) for turn in range(20)]
        for turn, source in enumerate(kept):
            server.core.store(keys(seed + turn), source, lambda stored: None)
            server.core.load(keys(seed + turn), source, lambda loaded: None)
        server.core.close()
    finally:
        serving.resume()
    refused: queue.Queue[Any] = queue.Queue()
    server.core.store(keys(seed), kept[0], refused.put)
    assert not refused.get_nowait().complete


def test_threads_that_store_and_load_at_once_read_what_was_stored(
    start: Any, shared: Serving, seed: int
) -> None:
    server = start(shared.address)
    named, source = keys(seed, 32), filled(seed, 32)
    before = contents(source)
    begin, all_stored = threading.Barrier(4), threading.Event()

    def store() -> None:
        begin.wait()
        for place in range(32):
            assert server.store(named[place : place + 1], source[place : place + 1]).complete

    def load() -> int:
        """The last time when all is there, however much faster loads are than stores."""
        begin.wait()
        found = turns = 0
        last = False
        while turns < 10 or not last:
            last = all_stored.is_set()
            target = blank(32)
            came = server.prefetch(named, target)
            found += sum(came)
            turns += 1
            for place in np.flatnonzero(came):
                assert contents(target)[place] == before[place]
        return found

    with ThreadPoolExecutor(4) as threads:
        stored = threads.submit(store)
        stored.add_done_callback(lambda _: all_stored.set())
        loads = [threads.submit(load) for _ in range(3)]
        stored.result()
        assert all(one.result() > 0 for one in loads)
    assert server.core.status()["locked_chunks"] == 0


def test_bad_address_refuses_the_start(start: Any) -> None:
    with pytest.raises(kvw.UsageError, match="http"):
        start("http://nobody")

"""Real daemons that read from a folder as their remote tier: pages come back, on the host that put
them and on others, and what is not what was stored is a miss. Nothing keeps a load beyond its
time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from testkit.remote_host import (
    LOAD_S,
    NAMES,
    PAGE_BYTES,
    RECORD_BYTES,
    RUN_PAGES,
    SPACE,
    RemoteHost,
    pages,
    tokens,
)

Hosts = Callable[..., RemoteHost]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosts]:
    """Hosts of one fleet, each with a socket and an arena of its own."""
    made: list[RemoteHost] = []

    def serve(*, environment: dict[str, str] | None = None, **settings: Any) -> RemoteHost:
        one = RemoteHost(tmp_path, **{"remote_write": "all", **settings})
        made.append(one)
        one.serving.environment |= environment or {}
        one.start()
        return one

    yield serve
    for one in made:
        one.remove()


def test_pages_that_left_all_tiers_of_a_host_come_back(host: Hosts) -> None:
    one = host()
    one.put(1, runs=3)
    assert one.found(1, 3) == {"dram": 3 * RUN_PAGES}
    one.empty()
    one.until_remote(1, 3)
    loaded = one.load(1, 3)
    assert (loaded, loaded.missed) == (3 * RUN_PAGES, {})
    assert one.found(1, 3) == {"dram": 3 * RUN_PAGES}
    status = one.until(lambda status: status["gets"].get("filled", 0) == 3, "three were got")
    assert status["get_bytes"] == 3 * RUN_PAGES * RECORD_BYTES
    assert one.client.status()["core"]["lookups"]["pages_hit_remote"] >= 3 * RUN_PAGES


def test_prompt_that_goes_on_where_a_stored_one_ends_loads_what_both_tiers_have(
    host: Hosts,
) -> None:
    one = host()
    one.put(1, runs=2)
    one.empty()
    space = one.client.open(SPACE)
    few = RUN_PAGES // 2  # the first half of the first object
    stored = space.store(tokens(1, 2)[: few * 16], pages(1, 2)[:few], timeout_s=LOAD_S)
    assert stored.stored == few
    wanted = {"dram": few, "remote": 2 * RUN_PAGES - few}
    eventually(lambda: one.found(1, 2) == wanted, "the rest is found in the store")
    assert one.load(1, 2) == 2 * RUN_PAGES
    status = one.until(lambda status: status["gets"].get("filled", 0) == 2, "both were got")
    assert status["get_bytes"] == (2 * RUN_PAGES - few) * RECORD_BYTES


def test_other_hosts_of_the_fleet_find_and_load_what_one_has_put(host: Hosts) -> None:
    one = host()
    one.put(1, 2)
    other = host()
    for prompt in (1, 2):
        other.until_remote(prompt)
        assert other.load(prompt) == RUN_PAGES
    assert other.found(3) == {}
    assert one.load(1) == RUN_PAGES


def test_successor_of_a_host_that_lost_its_memory_starts_warm(host: Hosts) -> None:
    one = host()
    one.put(1)
    one.client.close()
    one.serving.kill()
    for path in one.serving.arena_dir.iterdir():
        if path.is_file() and path.name != "identity":
            path.unlink()
    one.start()
    one.until_remote(1)
    assert one.load(1) == RUN_PAGES


@pytest.mark.parametrize("at", [0, 5, RUN_PAGES - 1])
def test_flipped_byte_in_the_store_is_a_miss_from_its_page_on(host: Hosts, at: int) -> None:
    one = host()
    one.put(1)
    ((_, path),) = one.paths().items()
    data = bytearray(path.read_bytes())
    data[at * RECORD_BYTES + 4096 + 77] ^= 1
    path.write_bytes(data)
    one.empty()
    one.until_remote(1)
    loaded = one.load(1)
    assert loaded == at
    assert loaded.missed == {"remote_damaged": RUN_PAGES - at}
    # Counted as damaged first, and then as a get that has ended.
    status = one.until(lambda status: status["gets"], "it was counted")
    assert (status["gets"], status["damaged"]) == ({"damaged": 1}, {"digest": 1})
    eventually(lambda: "remote" not in one.found(1), "it is not looked for any more")


def test_damaged_object_is_put_anew_once_its_pages_are_computed(host: Hosts) -> None:
    """Incident: the store was asked to put where there is none, so the damaged one stayed, and the
    next lookup promised it again."""
    one = host()
    one.put(1)
    ((_, path),) = one.paths().items()
    path.write_bytes(bytes(path.stat().st_size))
    one.empty()
    one.until_remote(1)
    assert one.load(1) == 0
    eventually(lambda: one.found(1) == {}, "it is not looked for any more")
    one.put(1)
    assert any(path.read_bytes())
    one.empty()
    one.until_remote(1)
    # How the first get ended is told for a second (kEndedNs).
    eventually(lambda: one.load(1) == RUN_PAGES, "it is good")
    one.until(lambda status: status["gets"] == {"damaged": 1, "filled": 1}, "one was read anew")


def test_object_of_another_prompt_under_a_name_is_a_miss(host: Hosts) -> None:
    one = host()
    one.put(1, 2)
    paths = list(one.paths().values())
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    one.empty()
    for prompt in (1, 2):
        one.until_remote(prompt)
        loaded = one.load(prompt)
        assert (loaded, loaded.missed) == (0, {"remote_damaged": RUN_PAGES})


@pytest.mark.parametrize("left", [0, 100, 3 * RECORD_BYTES, 3 * RECORD_BYTES + 4096])
def test_cut_object_is_a_miss(host: Hosts, left: int) -> None:
    one = host()
    one.put(1)
    ((_, path),) = one.paths().items()
    path.write_bytes(path.read_bytes()[:left])
    one.empty()
    one.until_remote(1)
    loaded = one.load(1)
    assert loaded <= left // RECORD_BYTES
    assert sum(loaded.missed.values()) == RUN_PAGES - loaded


def test_object_that_is_gone_is_a_miss_once_and_not_looked_for_again(host: Hosts) -> None:
    one = host()
    one.put(1, 2)
    one.empty()
    for path in one.paths().values():
        path.unlink()
    one.until_remote(1)
    loaded = one.load(1)
    assert (loaded, loaded.missed) == (0, {"remote_missing": RUN_PAGES})
    eventually(lambda: one.found(1) == {}, "its cell is gone")
    assert one.found(2) == {"remote": RUN_PAGES}
    one.store(1)  # and computed anew it is there as ever
    assert one.load(1) == RUN_PAGES


def test_clear_reaches_the_store_and_all_hosts(host: Hosts) -> None:
    one, other = host(), host()
    one.put(1)
    other.until_remote(1)
    assert other.load(1) == RUN_PAGES
    one.client.clear(SPACE)
    assert one.found(1) == {}
    eventually(lambda: other.found(1) == {}, "the other host has heard of it")
    for each in (one, other):
        assert each.load(1) == 0
        each.stop()
        each.start()
        each.until_state("serving")
        assert each.found(1) == {}
    one.put(1)  # the same content is welcome again
    one.empty()
    one.until_remote(1)
    assert one.load(1) == RUN_PAGES
    epochs = {name.epoch for name in one.paths()}
    assert len(epochs) == 2  # of before, until the janitor comes, and of now
    assert all(NAMES.epoch(name.namespace, name.epoch) for name in one.paths())


def test_killed_worker_costs_misses_and_no_more(host: Hosts) -> None:
    one = host()
    one.put(1)
    one.empty()
    one.until_remote(1)
    os.kill(one.worker(), signal.SIGKILL)
    loaded = one.load(1)  # by the next one, or not
    assert loaded in (0, RUN_PAGES)
    assert sum(loaded.missed.values()) == RUN_PAGES - loaded
    one.until_remote(1) if loaded == 0 else None
    assert one.load(1) == RUN_PAGES


def test_worker_that_stands_still_keeps_no_load_beyond_its_time(host: Hosts) -> None:
    one = host(environment={"KVW_TEST_SILENT_LOOKS": "1000"})
    one.put(1)
    one.empty()
    one.until_remote(1)
    worker = one.pause_worker()
    try:
        loaded = one.load(1, timeout_s=0.5)  # and not for as long as nobody answers
        assert (loaded, sum(loaded.missed.values())) == (0, RUN_PAGES)
        eventually(lambda: one.found(1) == {}, "nothing is promised any more")
        assert one.load(1).missed  # at once
        one.store(2)
        assert one.load(2) == RUN_PAGES
    finally:
        os.kill(worker, signal.SIGCONT)
    # By what was read for those who did not wait, or by who reads it again.
    eventually(lambda: one.load(1) == RUN_PAGES, "it is had again")


def test_nothing_is_read_where_that_is_asked_for(host: Hosts) -> None:
    one = host(remote_read="off")
    one.put(1)
    one.empty()
    one.until_state("serving")
    assert one.found(1) == {}
    assert one.load(1) == 0
    assert one.status["gets"] == {}


def test_host_that_only_reads_puts_nothing(host: Hosts) -> None:
    one, reader = host(), host(remote_write="none")
    one.put(1)
    other = len(one.paths())
    reader.until_remote(1)
    assert reader.load(1) == RUN_PAGES
    reader.store(2)
    reader.use(2, 2)
    assert len(one.paths()) == other


def test_many_loads_at_once_get_each_object_once(host: Hosts) -> None:
    one = host()
    one.put(1, 2, runs=4)
    one.empty()
    one.until_remote(1, 4)
    one.until_remote(2, 4)
    with ThreadPoolExecutor(8) as threads:
        loads = [threads.submit(one.load, 1 + i % 2, 4) for i in range(16)]
        assert {int(each.result()) for each in loads} == {4 * RUN_PAGES}
    status = one.until(lambda status: status["gets"].get("filled", 0) >= 8, "all were got")
    assert status["gets"] == {"filled": 8}


def test_tiers_say_what_is_remote(host: Hosts) -> None:
    one = host()
    one.put(1)
    one.empty()
    one.until_remote(1)
    space = one.client.open(SPACE)
    tiers = space.tiers(tokens(1) + [7] * 16)
    assert tiers.tolist() == [kvw.Tier.REMOTE] * RUN_PAGES + [kvw.Tier.MISSING]
    out = np.zeros((4, PAGE_BYTES), np.uint8)
    assert space.load(tokens(1), out, timeout_s=LOAD_S) == 4  # fewer than the object has
    assert np.array_equal(out, pages(1)[:4])

"""Parts of export and import that need no daemon: the order of pages, room, the rate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvwarehouse.backup import RateLimit
from kvwarehouse.backup.chains import Chains
from kvwarehouse.backup.listing import add_listed
from kvwarehouse.backup.prompt_path import PromptPath
from kvwarehouse.backup.room import QUEUE_BYTES, MayLeave, Room
from kvwarehouse.client import Client
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.watch import Changes, PageChange
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.types import FlushResult

MIB = 1 << 20


def change(name: str, tiers: tuple[str, ...] = ("dram",), *, keyed: bool = False) -> PageChange:
    """ "abc" is the page "c" of a prompt whose pages before it are "a" and "ab"."""
    witness = name.encode()
    return PageChange(
        stored=True,
        namespace_id=bytes(16),
        key=witness,
        tiers=tiers,
        position=len(name) - 1,
        parent=witness[:-1],
        tokens=b"" if keyed else witness,
        engine_key=witness if keyed else b"",
    )


def walked(chains: Chains, most: int, missing: str = "") -> list[str]:
    """Each run's pages, of which those behind `missing` are refused."""
    runs = chains.runs(most)
    seen: list[str] = []
    run = next(runs, None)
    while run:
        names = [page.witness.decode() for page in run]
        taken = names.index(missing) if missing in names else len(names)
        seen += names[:taken]
        try:
            run = runs.send(taken)
        except StopIteration:
            break
    return seen


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_pages_come_in_pre_order_however_long_a_run_may_be(most: int) -> None:
    chains = Chains()
    chains.add(map(change, ("a", "x", "ab", "ac", "abd", "abe", "acf", "abdg", "xy")))
    seen = walked(chains, most)
    assert seen == ["a", "ab", "abd", "abdg", "abe", "ac", "acf", "x", "xy"]


def test_pages_below_one_that_is_missing_do_not_come() -> None:
    chains = Chains()
    chains.add(map(change, ("a", "ab", "abc", "abcd", "abe", "af")))
    assert walked(chains, 100, missing="ab") == ["a", "af"]
    chains = Chains()
    chains.add(map(change, ("a", "ab", "abc", "abcd", "abe", "af")))
    assert walked(chains, 1, missing="abc") == ["a", "ab", "abe", "af"]


def test_page_without_its_parent_is_left_out_and_counted() -> None:
    chains = Chains()
    chains.add([change("a"), change("bc"), change("bcd"), change("ab", keyed=True), change("a")])
    assert walked(chains, 9) == ["a"]
    assert chains.left_out == {"no_parent": 3}


def test_pages_on_nvme_alone_are_left_out_where_dram_is_asked_for() -> None:
    chains = Chains("dram")
    chains.add(
        [change("a"), change("ab", ("nvme",)), change("abc"), change("ad", ("dram", "nvme"))]
    )
    assert walked(chains, 9) == ["a", "ad"]
    assert chains.left_out == {"not_in_dram": 1, "no_parent": 1}


def told(*messages: Changes) -> Client:
    """A client whose watch says these, and then for ever that the daemon is there."""

    def watch(space: StoredNamespace) -> Iterator[Changes]:
        yield from messages
        yield from repeat(Changes((), synced=False))

    return cast(Client, SimpleNamespace(watch=watch))


SPACE = cast(StoredNamespace, None)


def test_pages_of_all_messages_are_listed_up_to_synced() -> None:
    chains = Chains()
    messages = [Changes((change(name),), synced=name == "abc") for name in ("a", "ab", "abc", "x")]
    add_listed(told(*messages), SPACE, chains, 60.0)
    assert walked(chains, 100) == ["a", "ab", "abc"]


def test_daemon_that_says_nothing_of_its_pages_is_not_waited_for() -> None:
    """It answers, and its core does not: what comes every few seconds is empty."""
    with pytest.raises(TransportError, match="--timeout") as caught:
        add_listed(told(Changes((change("a"),), synced=False)), SPACE, Chains(), 0.05)
    assert caught.value.code == "deadline"


def test_path_gives_tokens_or_keys_of_the_way_to_a_page() -> None:
    path = PromptPath()
    for page in range(3):
        path.add(np.array([page, page], "<u4").tobytes(), by_tokens=True)
    assert path.prefix()["tokens"].tolist() == [0, 0, 1, 1, 2, 2]
    assert path.prefix(2)["tokens"].tolist() == [0, 0, 1, 1]
    path.cut(0)
    path.add(b"key", by_tokens=False)
    assert path.prefix() == {"keys": [b"key"]}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


def test_rate_is_kept_and_pauses_are_not_made_up_for() -> None:
    clock = Clock()
    rate = RateLimit(1000, clock, clock.sleep)
    for _ in range(10):
        rate.spend(500)
    assert clock.slept_s == pytest.approx(5.0)
    clock.now_s += 60
    rate.spend(2000)
    assert clock.slept_s == pytest.approx(7.0)
    assert (rate.window_bytes(16 * MIB), rate.window_bytes(10)) == (1000, 10)
    assert RateLimit(None).window_bytes(16 * MIB) == 16 * MIB
    RateLimit(None, clock, clock.sleep).spend(1 << 40)
    assert clock.slept_s == pytest.approx(7.0)


class Statuses:
    """A client that says what a daemon's status is: DRAM of 64 MiB, NVMe of 128 MiB."""

    def __init__(self) -> None:
        self.dram: dict[str, Any] = {
            "capacity_bytes": 64 * MIB,
            "used_bytes": 0,
            "zombie_slots": 0,
            "left": {},
        }
        self.nvme: dict[str, Any] = {
            "health": "ok",
            "capacity_bytes": 128 * MIB,
            "segments": 64,
            "free_segments": 60,
            "queued_bytes": 0,
            "left": {},
            "not_admitted": {},
        }
        self.index = {"pages": 0, "capacity": 64_000}
        self.flushes = 0
        self.unwritten = [0]
        """Pages that are not on NVMe after the next flushes; the last number stays."""

    def namespaces(self) -> list[Any]:
        """Of one page size."""
        fields = ({"shards": 1, "page_bytes": MIB}, {"shards": 2, "page_bytes": MIB // 2 - 9})
        return [SimpleNamespace(fields=each) for each in fields]

    def status(self) -> dict[str, Any]:
        tiers = {"dram": self.dram, "nvme": self.nvme}
        return {"core": {"tiers": tiers, "index": self.index}}

    def flush(self, timeout_s: float) -> FlushResult:
        self.flushes += 1
        left = self.unwritten.pop(0) if len(self.unwritten) > 1 else self.unwritten[0]
        return FlushResult(0, left, 0)

    def room(self, may_leave: MayLeave = "none", clock: Clock | None = None) -> Room:
        clock = clock or Clock()
        return Room(cast(Client, self), may_leave, clock, clock.sleep)


def fitting(room: Room, pages: int = 100_000) -> int:
    room.look()
    return room.take(pages, 1, MIB)


def test_room_is_what_is_free_in_the_fuller_tier() -> None:
    statuses = Statuses()
    room = statuses.room()
    assert fitting(room) == 56
    assert room.take(1, 1, MIB) == 0, "it was taken"
    statuses.nvme["free_segments"] = 13
    assert fitting(room) == 20
    statuses.nvme["queued_bytes"] = 2 * MIB
    assert fitting(room) == 18
    statuses.nvme["health"] = "read_only"
    assert fitting(room) == 56, "nothing is written to it"
    statuses.index["pages"] = 62_990
    assert fitting(room) == 10


def test_room_counts_what_shards_are_padded_to() -> None:
    statuses = Statuses()
    room = statuses.room()
    room.look()
    assert room.take(100_000, 2, 5000) == 56 * MIB // (2 * 8192)


@pytest.mark.parametrize("why", ["evicted", "rebalanced", "reclaimed"])
@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_there_is_no_room_once_pages_leave_for_want_of_it(tier: str, why: str) -> None:
    statuses = Statuses()
    statuses.dram["left"] = {"evicted": 7}
    room = statuses.room()
    assert fitting(room, 5) == 5
    getattr(statuses, tier)["left"] = {"evicted": 7, why: 8, "cleared": 3}
    assert fitting(room) == 0


def test_dram_may_make_room_where_nvme_has_room() -> None:
    statuses = Statuses()
    room = statuses.room("dram")
    statuses.dram |= {"used_bytes": 64 * MIB, "left": {"evicted": 9}}
    assert fitting(room) == 114
    statuses.nvme["free_segments"] = 3
    assert fitting(room) == 0
    assert fitting(statuses.room("all")) == 100_000


@pytest.mark.parametrize("health", ["off", "read_only"])
def test_dram_may_not_make_room_where_nvme_has_not_its_pages(health: str) -> None:
    statuses = Statuses()
    statuses.nvme["health"] = health
    with pytest.raises(UsageError) as caught:
        statuses.room("dram")
    assert caught.value.code == "no_nvme"


def test_long_write_queue_is_waited_for_but_not_for_ever() -> None:
    statuses, clock = Statuses(), Clock()
    statuses.nvme["queued_bytes"] = QUEUE_BYTES
    fitting(statuses.room("all", clock))
    assert clock.slept_s == pytest.approx(30, abs=1), "a disk that stands still"
    statuses.nvme["queued_bytes"] = 4 * MIB
    before = clock.slept_s
    fitting(statuses.room("all", clock))
    assert clock.slept_s == before


def test_what_missed_the_write_queue_is_waited_for_where_dram_makes_room() -> None:
    statuses, clock = Statuses(), Clock()
    room = statuses.room("dram", clock)
    statuses.unwritten = [2, 0]
    assert (fitting(room), statuses.flushes) == (114, 2), "pages of before"
    assert (fitting(room), statuses.flushes) == (114, 2), "nothing more missed it"
    statuses.nvme["not_admitted"] = {"queue_full": 9, "parent_not_admitted": 1}
    assert (fitting(room), statuses.flushes) == (114, 3)
    statuses.nvme |= {"not_admitted": {"queue_full": 10}, "free_segments": 3}
    assert (fitting(room), statuses.flushes) == (0, 3), "a flush would need NVMe's room"
    for may_leave in ("none", "all"):
        other = statuses.room(may_leave, clock)
        statuses.nvme["not_admitted"]["queue_full"] += 1
        fitting(other)
    assert statuses.flushes == 3
    assert clock.slept_s < 1


def test_there_is_no_room_while_nvme_does_not_take_what_dram_would_lose() -> None:
    statuses, clock = Statuses(), Clock()
    room = statuses.room("dram", clock)
    statuses.nvme |= {"health": "read_only", "not_admitted": {"read_only": 2}}
    statuses.unwritten = [2]
    assert fitting(room) == 0
    assert clock.slept_s == pytest.approx(30, abs=1)


def test_room_that_a_clear_gives_back_is_waited_for() -> None:
    """Incident: an import a moment after a clear found no room, and stored nothing."""
    statuses, clock = Statuses(), Clock()
    statuses.dram |= {"used_bytes": 60 * MIB, "zombie_slots": 60}

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.slept_s > 0.3:
            statuses.dram |= {"used_bytes": 0, "zombie_slots": 0}

    assert fitting(Room(cast(Client, statuses), "none", clock, sleep)) == 56
    assert clock.slept_s < 1


def test_room_that_a_reader_holds_is_waited_for_once() -> None:
    statuses, clock = Statuses(), Clock()
    statuses.dram |= {"used_bytes": 60 * MIB, "zombie_slots": 60}
    room = statuses.room("none", clock)
    for _ in range(3):
        assert fitting(room) == 0
    assert clock.slept_s == pytest.approx(2, abs=0.1)
    assert fitting(statuses.room("all", clock)) == 100_000
    assert clock.slept_s == pytest.approx(2, abs=0.1)


def test_status_has_what_room_is_read_from() -> None:
    """The names of status.proto."""
    from kvwarehouse.wire import plain, status_pb2

    core = plain(status_pb2.CoreStatus(tiers=status_pb2.TiersStatus()))
    client = SimpleNamespace(status=lambda: {"core": core}, namespaces=list)
    Room(cast(Client, client), "none").look()

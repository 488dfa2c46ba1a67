"""Bytes that change where they lie: in the arena, in segments, in metadata, live and while the
daemon is down; files that are torn, foreign or rubbish.

A damaged page is a miss, or the other tier's good copy, and is counted; damaged files give a clear
refusal or are rebuilt. Nothing wrong is ever served.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.testing import damage, tally
from kvwarehouse.testing.client_process import ClientProcess
from kvwarehouse.testing.pages import check_pages, page_of, pages_of
from kvwarehouse.testing.serving import RefusedError, Serving
from kvwarehouse.testing.until import until

pytestmark = pytest.mark.timeout(240)

PAGE_BYTES = 20_000
PAGES = 12
NODES = list(range(PAGES))
BAD = 5
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
OTHER_SPACE = kvw.Namespace(
    model="other", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
SIZES = {"dram": "8MiB", "nvme_capacity": "32MiB", "nvme_segment": "2MiB", "grace_s": "0.1"}


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test that holds is a fault against a live daemon."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed == failed:
        tally.count("stored bytes, files or ledger damaged, with a live daemon")


@pytest.fixture
def dram_only(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="8MiB", grace_s="0.1") as serving:
        yield serving


@pytest.fixture
def both_tiers(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, **SIZES) as serving:
        yield serving


def store(client: kvw.Client, space: kvw.Namespace = SPACE) -> None:
    result = client.open(space).store(NODES, pages_of(NODES, 0, 0, PAGE_BYTES))
    assert result.stored == PAGES


def load(client: kvw.Client, space: kvw.Namespace = SPACE) -> kvw.Loaded:
    """Checks every byte of what is loaded."""
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    loaded = client.open(space).load(NODES, out, timeout_s=30)
    check_pages(out[:loaded], NODES[:loaded], 0, 0)
    return loaded


def in_arena(serving: Serving, node: int) -> damage.Place:
    return damage.find_one([serving.arena_dir / "arena"], page_of(node, 0, 0, PAGE_BYTES))


def in_segments(serving: Serving, node: int) -> damage.Place:
    return damage.find_one(serving.segments, page_of(node, 0, 0, PAGE_BYTES))


def core(client: kvw.Client) -> Any:
    return client.status()["core"]


# --- live: one daemon for all, a namespace and bytes of its own for each test


class Case:
    """A prompt that is stored, in a namespace of the test's own, and counters from here on."""

    def __init__(self, serving: Serving, client: kvw.Client, version: int) -> None:
        self.serving, self.client, self.version = serving, client, version
        fields = {**SPACE.to_fields(), "salt": str(version)}
        self.space = kvw.Namespace(**fields)
        self.ns = client.open(self.space)
        self.before = core(client)
        assert self.store().stored == PAGES

    def store(self) -> kvw.StoreResult:
        return self.ns.store(NODES, pages_of(NODES, 0, self.version, PAGE_BYTES))

    def load(self, client: kvw.Client | None = None, first: int = 0) -> kvw.Loaded:
        out = np.zeros((PAGES - first, PAGE_BYTES), np.uint8)
        ns = (client or self.client).open(self.space)
        loaded = ns.load(NODES, out, first=first, timeout_s=30)
        check_pages(out[:loaded], NODES[first : first + loaded], 0, self.version)
        return loaded

    def in_arena(self, node: int) -> damage.Place:
        page = page_of(node, 0, self.version, PAGE_BYTES)
        return damage.find_one([self.serving.arena_dir / "arena"], page)

    def in_segments(self, node: int) -> damage.Place:
        page = page_of(node, 0, self.version, PAGE_BYTES)
        return damage.find_one(self.serving.segments, page)

    def on_nvme_alone(self) -> None:
        assert self.client.flush().pending == 0
        assert self.client.evict(self.space, PAGES) == PAGES

    def risen(self, *path: str) -> int:
        """By how much a counter of status has risen."""
        before, now = self.before, core(self.client)
        for name in path:
            before, now = before.get(name, 0), now[name]
        return int(now - before)


@pytest.fixture(scope="module")
def live_dram(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("live"), dram="8MiB", grace_s="0.1") as serving:
        yield serving


@pytest.fixture(scope="module")
def live_nvme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("live"), **SIZES) as serving:
        yield serving


@pytest.fixture
def in_dram(live_dram: Serving, rng: random.Random) -> Iterator[Case]:
    with live_dram.connect() as client:
        yield Case(live_dram, client, 1 + rng.getrandbits(30))


@pytest.fixture
def in_both(live_nvme: Serving, rng: random.Random) -> Iterator[Case]:
    with live_nvme.connect() as client:
        yield Case(live_nvme, client, 1 + rng.getrandbits(30))


@pytest.mark.parametrize("remote", [False, True])
def test_page_with_a_flipped_bit_is_a_miss_and_is_quarantined(
    in_dram: Case, rng: random.Random, remote: bool
) -> None:
    serving = in_dram.serving
    with serving.connect_remote() if remote else serving.connect() as client:
        in_dram.in_arena(BAD).flip(rng.randrange(8), at=rng.randrange(PAGE_BYTES))
        loaded = in_dram.load(client)
        assert loaded == BAD
        assert loaded.missed
        assert in_dram.risen("quarantined") == 1
        assert in_dram.risen("tiers", "dram", "left", "quarantined") == 1
        assert in_dram.risen("loads", "failed", "mismatch") >= 1
        assert in_dram.ns.lookup(NODES).pages == BAD
        counted = serving.metrics()["kvwarehouse_quarantined_pages_total"]
        assert counted == core(client)["quarantined"]
        # What can be stored again is stored again.
        client.sweep()
        assert in_dram.store().dropped == {}
        assert in_dram.load(client) == PAGES


def test_swapped_payloads_of_two_pages_are_two_misses(in_dram: Case) -> None:
    damage.swap(in_dram.in_arena(BAD), in_dram.in_arena(BAD + 2), PAGE_BYTES)
    assert in_dram.load() == BAD
    assert list(in_dram.client.check(in_dram.space, repair=True))[-1].done
    # The first was reported by the load, the second is found by the check, if no sweep was faster.
    gone = in_dram.risen("quarantined") + in_dram.risen("tiers", "dram", "left", "orphaned")
    assert gone >= 2
    assert in_dram.ns.lookup(NODES).pages == BAD


def test_check_finds_damage_that_nobody_has_loaded(in_dram: Case) -> None:
    in_dram.in_arena(BAD).flip()
    client = in_dram.client
    found = [bad for progress in client.check(in_dram.space) for bad in progress.bad]
    assert [(bad.tier, bad.reason) for bad in found] == [("dram", "digest")]
    assert in_dram.risen("quarantined") == 0
    for _ in client.check(in_dram.space, repair=True):
        pass
    assert in_dram.risen("quarantined") == 1
    assert in_dram.load() == BAD


def test_flipped_page_is_loaded_from_its_good_copy_on_nvme(
    in_both: Case, rng: random.Random
) -> None:
    assert in_both.client.flush().pending == 0
    in_both.in_arena(BAD).flip(at=rng.randrange(PAGE_BYTES))
    assert in_both.load() == PAGES
    assert in_both.risen("quarantined") == 1


@pytest.mark.parametrize("verify", ["always", "boundary"])
def test_record_with_a_flipped_bit_is_a_miss_and_is_counted(
    in_both: Case, rng: random.Random, verify: Any
) -> None:
    in_both.on_nvme_alone()
    in_both.in_segments(BAD).flip(rng.randrange(8), at=rng.randrange(PAGE_BYTES))
    with in_both.serving.connect(verify=verify) as client:
        assert in_both.load(client) == BAD
    assert in_both.risen("tiers", "nvme", "mismatches") == 1
    assert in_both.risen("quarantined") == 1
    assert in_both.risen("tiers", "nvme", "left", "quarantined") == 1
    assert in_both.ns.lookup(NODES).pages == BAD


def test_swapped_records_are_two_misses_whether_payloads_or_whole(in_both: Case) -> None:
    in_both.on_nvme_alone()
    damage.swap(in_both.in_segments(BAD), in_both.in_segments(BAD + 1), PAGE_BYTES)
    three, four = in_both.in_segments(BAD + 2), in_both.in_segments(BAD + 3)
    damage.swap(three.before(4096), four.before(4096), 4096 + PAGE_BYTES)
    assert in_both.load() == BAD
    for node in (BAD + 1, BAD + 2, BAD + 3):
        assert in_both.load(first=node) == 0
    assert in_both.risen("tiers", "nvme", "mismatches") >= 1


# --- the arena, while the daemon is down


@pytest.mark.parametrize("verify", ["always", "boundary"])
def test_page_flipped_while_the_daemon_was_down_is_a_miss_at_its_first_load(
    dram_only: Serving, verify: Any
) -> None:
    """Also for those who verify at boundaries alone: re-attached memory is one."""
    with dram_only.connect() as client:
        store(client)
        dram_only.kill()
        in_arena(dram_only, BAD).flip(at=PAGE_BYTES - 1)
        dram_only.start()
        with dram_only.connect(verify=verify) as careful:
            assert load(careful) == BAD
            assert load(careful) == BAD
        assert core(client)["quarantined"] == 1


def test_slot_with_a_damaged_header_is_dropped_at_the_start_and_counted(
    dram_only: Serving, rng: random.Random
) -> None:
    with dram_only.connect() as client:
        store(client)
        [key] = [page.key for page in client.pages(SPACE) if page.position == BAD]
    dram_only.kill()
    slots = dram_only.arena_dir / "slots"
    # checksum 8, namespace 16, key 16: the key lies 24 bytes into the record of its slot.
    record = slots.read_bytes().index(key) - 24
    damage.Place(slots, record).flip(rng.randrange(8), at=rng.randrange(8, 40))
    dram_only.start()
    with dram_only.connect() as client:
        assert core(client)["recovery"]["dropped_slots"] == 1
        assert load(client) == BAD


def test_noise_over_all_slot_headers_serves_nothing_wrong(
    dram_only: Serving, rng: random.Random
) -> None:
    with dram_only.connect() as client:
        store(client)
        dram_only.kill()
        slots = dram_only.arena_dir / "slots"
        size = slots.stat().st_size
        place = damage.Place(slots, 2 * 4096)  # past the file's header and the cuts of its slabs
        data = bytearray(place.read(size - 2 * 4096))
        for at in range(len(data)):
            if data[at]:
                data[at] = rng.getrandbits(8)
        place.write(bytes(data))
        dram_only.start()
        assert load(client) == 0
        assert core(client)["tiers"]["dram"]["pages"] == 0

        def stored() -> bool:
            return client.open(SPACE).store(NODES, pages_of(NODES, 0, 0, PAGE_BYTES)).dropped == {}

        until(stored, "the slots are usable again")
        assert load(client) == PAGES


# --- segments


@pytest.mark.parametrize("orderly", [True, False])
def test_records_damaged_while_the_daemon_was_down_are_misses(
    both_tiers: Serving, rng: random.Random, orderly: bool
) -> None:
    """Closed segments are believed by their table and checked when read; open ones are scanned."""
    with both_tiers.connect() as client:
        store(client)
        assert client.flush().pending == 0
    if orderly:
        both_tiers.stop()
    else:
        both_tiers.kill()
    both_tiers.lose_arena()
    in_segments(both_tiers, BAD).flip(rng.randrange(8), at=rng.randrange(PAGE_BYTES))
    both_tiers.start()
    with both_tiers.connect() as client:
        assert load(client) == BAD
        status = core(client)
        assert status["recovery"]["refused_records"] + status["quarantined"] == 1


def test_segments_cut_short_zeroed_or_full_of_noise_are_no_obstacle(
    both_tiers: Serving, rng: random.Random
) -> None:
    with both_tiers.connect() as client:
        store(client)
        store(client, OTHER_SPACE)
        assert client.flush().pending == 0
    both_tiers.kill()
    both_tiers.lose_arena()
    for number, path in enumerate(both_tiers.segments):
        kind = number % 3
        data = path.read_bytes()
        half = len(data) // 2
        path.write_bytes((data[:half], bytes(len(data)), rng.randbytes(len(data)))[kind])
    both_tiers.start()
    with both_tiers.connect() as client:
        load(client)
        load(client, OTHER_SPACE)
        client.clear(None)
        store(client)
        assert client.flush().pending == 0
        assert core(client)["tiers"]["nvme"]["health"] == "ok"
        assert client.evict(SPACE, PAGES) == PAGES
        assert load(client) == PAGES


def test_segment_of_another_warehouse_is_neither_served_nor_touched(
    both_tiers: Serving, tmp_path: Path
) -> None:
    with Serving(tmp_path / "other", **SIZES) as other:
        with other.connect() as client:
            store(client)
            assert client.flush().pending == 0
        other.stop()
        foreign = [path for path in other.segments if damage.find([path], page_of(0, 0, 0, 4096))]
        copied = both_tiers.nvme_dir / "segments" / "00000400.seg"
        both_tiers.stop()
        shutil.copyfile(foreign[0], copied)
    kept = copied.read_bytes()
    both_tiers.start()
    with both_tiers.connect() as client:
        assert core(client)["recovery"]["foreign_segments"] == 1
        assert load(client) == 0
        store(client)
        assert client.flush().pending == 0
        assert load(client) == PAGES
    assert copied.read_bytes() == kept


# --- the small files


def rubbish(path: Path) -> None:
    path.write_bytes(b"rubbish" * 1000)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 8])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def test_stale_and_strange_files_beside_the_arena_are_no_obstacle(dram_only: Serving) -> None:
    with dram_only.connect() as client:
        store(client)
        pins = client.open(SPACE).pin(NODES[:3])
        dram_only.kill()
        sessions = dram_only.arena_dir / "sessions"
        rubbish(sessions / "ffffffffffffff01")
        (sessions / "ffffffffffffff02").write_bytes(b"")
        rubbish(sessions / "not-a-session")
        (sessions / "directory").mkdir()
        (sessions / "0000000000000007").symlink_to("/etc/hostname")
        rubbish(dram_only.arena_dir / "index.999")
        rubbish(dram_only.arena_dir / "index.new")
        rubbish(dram_only.arena_dir / "control.new")
        dram_only.start()
        assert load(client) == PAGES
        assert core(client)["incarnation"] > 999
        assert not (dram_only.arena_dir / "index.999").exists()
        client.evict(SPACE, PAGES)
        assert client.open(SPACE).lookup(NODES).pages >= 3, "the pins were lost"
        pins.release()

        def buried() -> bool:
            return not (sessions / "ffffffffffffff01").exists()

        until(buried, "a session of nobody is buried")
        assert Path("/etc/hostname").exists()


def test_session_file_that_is_cut_short_ends_the_session_and_not_the_daemon(
    dram_only: Serving,
) -> None:
    """A client can truncate what it can write."""
    sessions = dram_only.arena_dir / "sessions"
    with dram_only.connect() as client:
        store(client)
        before = set(sessions.iterdir())
        with ClientProcess(dram_only.address, "say(1); hear()") as other:
            other.hear()
            [file] = set(sessions.iterdir()) - before
            file.write_bytes(b"")
            assert client.evict(SPACE, 3) == 3  # reads the pins of every session
            assert load(client) == PAGES - 3
        until(lambda: not file.exists(), "the session of the dead client is buried")
        dram_only.stop()
        dram_only.start()
        assert load(client) == PAGES - 3


@pytest.mark.parametrize("harm", [truncated, zeroed, rubbish, Path.unlink])
def test_damaged_ledger_is_rebuilt_and_brings_back_nothing_that_was_cleared(
    both_tiers: Serving, harm: Callable[[Path], object]
) -> None:
    with both_tiers.connect() as client:
        store(client)
        assert client.flush().pending == 0
        client.clear(SPACE)
        store(client, OTHER_SPACE)
        assert client.flush().pending == 0
    both_tiers.kill()
    [ledger] = sorted(both_tiers.nvme_dir.glob("ledger.mdb"))
    harm(ledger)
    both_tiers.start()
    with both_tiers.connect() as client:
        assert client.status()["service"]["ledger_health"] == "rebuilt"
        assert client.open(SPACE).lookup(NODES).pages == 0
        assert load(client, OTHER_SPACE) == PAGES
        store(client)
        assert load(client) == PAGES


@pytest.mark.parametrize("harm", [truncated, zeroed, rubbish])
def test_damaged_identity_is_refused_and_healed_by_its_other_copy(
    both_tiers: Serving, harm: Callable[[Path], object]
) -> None:
    with both_tiers.connect() as client:
        store(client)
    both_tiers.stop()
    identity = both_tiers.nvme_dir / "identity"
    harm(identity)
    with pytest.raises(RefusedError) as refused:
        both_tiers.start()
    assert str(identity) in refused.value.text
    assert "copy the file from the warehouse's other directory" in refused.value.text
    shutil.copy2(both_tiers.arena_dir / "identity", identity)
    both_tiers.start()
    with both_tiers.connect() as client:
        assert load(client) == PAGES


@pytest.mark.parametrize("name", ["slots", "arena", "control"])
def test_damaged_arena_file_is_refused_by_name_or_rebuilt(dram_only: Serving, name: str) -> None:
    with dram_only.connect() as client:
        store(client)
    dram_only.stop()
    path = dram_only.arena_dir / name
    truncated(path)
    if name == "control":  # says nothing that the slots do not
        dram_only.start()
    else:
        with pytest.raises(RefusedError, match=f"directory {dram_only.arena_dir} away"):
            dram_only.start()
        shutil.move(dram_only.arena_dir, dram_only.folder / "aside")
        dram_only.start()
    with dram_only.connect() as client:
        load(client)
        client.clear(None)
        store(client)
        assert load(client) == PAGES


def test_arena_of_another_warehouse_is_refused_with_both_named(
    both_tiers: Serving, tmp_path: Path
) -> None:
    with Serving(tmp_path / "other", **SIZES) as other:
        other.stop()
        both_tiers.stop()
        own, both_tiers.settings["arena_dir"] = both_tiers.arena_dir, str(other.arena_dir)
        with pytest.raises(RefusedError) as refused:
            both_tiers.start()
        assert "different warehouses" in refused.value.text
        assert str(other.arena_dir) in refused.value.text
        assert str(both_tiers.nvme_dir) in refused.value.text
    both_tiers.settings["arena_dir"] = str(own)
    both_tiers.start()

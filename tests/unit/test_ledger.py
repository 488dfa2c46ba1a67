"""The ledger: what it keeps, and what it does when its file or its disk fails."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import lmdb
import pytest

from kvwarehouse import core
from kvwarehouse.daemon import ledger as module
from kvwarehouse.daemon import ledger_file
from kvwarehouse.daemon.disk_calls import DiskCalls, LateDiskError
from kvwarehouse.daemon.ledger import Ledger, WriteBalance
from kvwarehouse.daemon.logs import Log
from kvwarehouse.errors import CapacityError, StorageError, UsageError
from kvwarehouse.types import MAX_NAMESPACE_BYTES, MAX_TEXT_CHARS, Namespace
from kvwarehouse_bench.harness.eventually import DEADLINE_S

WAREHOUSE = b"w" * 16


def space(number: int) -> Namespace:
    return Namespace(
        model=f"m{number}", weights="w", dtype="b", layout="l/1", page_tokens=4, page_bytes=8
    )


class Kept:
    """Opens ledgers of one directory, one after the other."""

    def __init__(self, *directories: Path) -> None:
        self.directories = [str(path) for path in directories]
        self.log = io.StringIO()
        self.open_ones: list[Ledger] = []

    def open(self, *, expected: bool = False) -> Ledger:
        self.close()
        log = Log("json", self.log)
        opened = Ledger(self.directories, WAREHOUSE, log, expected=expected)
        self.open_ones.append(opened)
        return opened

    def close(self) -> None:
        while self.open_ones:
            self.open_ones.pop().close()

    @property
    def file(self) -> Path:
        return Path(self.directories[0], ledger_file.FILE_NAME)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    kept.close()


def filled(kept: Kept) -> Ledger:
    """Two namespaces, one cleared at epoch 1, two tombstones."""
    ledger = kept.open()
    for number in range(2):
        ledger.add(ledger.propose(space(number)))
    ledger.raise_epoch([space(1).id])
    ledger.bury([(b"a" * 16, 5), (b"b" * 16, 9)])
    return ledger


def facts(ledger: Ledger) -> tuple[Any, ...]:
    return (
        ledger.epoch,
        [(r.ordinal, r.space, r.clear_epoch) for r in ledger.namespaces()],
        dict(ledger.tombstones()),
    )


def test_ledger_is_the_same_after_it_was_closed_or_its_process_died(kept: Kept) -> None:
    before = facts(filled(kept))
    assert facts(kept.open()) == before
    # Not closed: what a commit returned for is on disk.
    open_one = kept.open_ones.pop()
    open_one.add(open_one.propose(space(2)))
    assert len(kept.open().namespaces()) == 3
    open_one.close()


def test_clear_sets_the_epoch_of_exactly_the_cleared(kept: Kept) -> None:
    ledger = filled(kept)
    assert ledger.raise_epoch([space(0).id]) == (2, True)
    assert [record.clear_epoch for record in ledger.namespaces()] == [2, 1]
    assert ledger.raise_epoch([space(0).id, space(1).id]) == (3, True)
    assert [record.clear_epoch for record in kept.open().namespaces()] == [3, 3]


def test_namespace_that_is_not_known_starts_at_the_floor(kept: Kept) -> None:
    """Incident: the next start after one that had found the ledger lost served cleared pages, and
    those that a clear of everything took from namespaces that had outlived the ledger."""
    ledger = filled(kept)
    assert ledger.propose(space(9)).clear_epoch == 0  # it has no pages, or a core found them
    assert ledger.raise_epoch(None) == (2, True)
    assert [record.clear_epoch for record in ledger.namespaces()] == [2, 2]
    for _ in range(2):
        assert kept.open().propose(space(9)).clear_epoch == 2


def test_floor_after_a_loss_is_the_highest_epoch_that_anybody_saw(kept: Kept) -> None:
    filled(kept)
    kept.close()
    kept.file.unlink()
    assert kept.open(expected=True).floor == module.LOST
    ledger = kept.open(expected=True)  # the one before was killed before its core had told
    assert not ledger.lost
    assert ledger.floor == module.LOST
    ledger.adopt_epoch(7)
    assert (ledger.epoch, ledger.floor) == (7, 7)
    ledger = kept.open(expected=True)
    ledger.adopt_epoch(9)
    assert (ledger.epoch, ledger.floor) == (9, 7)


def test_epoch_is_never_behind_one_that_was_seen(kept: Kept) -> None:
    ledger = kept.open()
    ledger.adopt_epoch(7)
    ledger.adopt_epoch(3)
    assert ledger.epoch == 7
    assert kept.open().epoch == 7


def test_namespaces_are_bounded_as_the_core_bounds_them(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.MAX_NAMESPACES == core.MAX_NAMESPACES
    monkeypatch.setattr(module, "MAX_NAMESPACES", 2)
    ledger = filled(kept)
    with pytest.raises(CapacityError) as caught:
        ledger.propose(space(2))
    assert caught.value.code == "too_many_namespaces"


def numbered(ledger: Ledger) -> dict[int, tuple[Namespace, int]]:
    return {each.ordinal: (each.space, each.clear_epoch) for each in ledger.namespaces()}


def test_forgotten_namespace_leaves_the_floor_and_its_number(kept: Kept) -> None:
    ledger = filled(kept)
    ledger.add(ledger.propose(space(2)))
    ledger.raise_epoch([space(2).id])
    assert ledger.forget([space(0).id, space(9).id]) == (3, True)
    for each in (ledger, kept.open()):
        assert each.find(space(0).id) is None
        assert (each.epoch, each.floor) == (3, 3)
        assert numbered(each) == {0: (space(2), 2), 1: (space(1), 1)}
    again = kept.open_ones[-1].propose(space(0))
    assert (again.ordinal, again.clear_epoch) == (2, 3)


def test_any_namespaces_may_be_forgotten_at_once(kept: Kept, rng: random.Random) -> None:
    for _ in range(20):
        ledger = kept.open()
        for number in range(6):
            if ledger.find(space(number).id) is None:
                ledger.add(ledger.propose(space(number)))
        gone = rng.sample(range(6), rng.randint(0, 6))
        cleared, _ = ledger.raise_epoch([space(number).id for number in range(6)])
        assert ledger.forget([space(number).id for number in gone]) == (cleared + 1, True)
        for each in (ledger, kept.open()):
            assert sorted(numbered(each)) == list(range(6 - len(gone)))
            left = {space(number) for number in range(6) if number not in gone}
            assert set(numbered(each).values()) == {(each_space, cleared) for each_space in left}


def test_namespace_has_room_after_one_was_forgotten(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_NAMESPACES", 2)
    ledger = filled(kept)
    ledger.forget([space(1).id])
    ledger.add(ledger.propose(space(2)))
    assert numbered(kept.open()) == {0: (space(0), 0), 1: (space(2), 2)}


def largest(number: int) -> Namespace:
    """With as many bytes as a warehouse takes."""
    fields = {**space(0).to_fields(), "salt": f"{number:04d}"}
    fields["extra"] = {f"{place:02d}": "" for place in range(12)}
    for name in fields["extra"]:
        missing = MAX_NAMESPACE_BYTES - len(json.dumps(fields))
        fields["extra"][name] = "x" * min(missing, MAX_TEXT_CHARS)
    assert len(json.dumps(fields)) == MAX_NAMESPACE_BYTES
    return Namespace.from_fields(fields)


def test_namespace_of_more_bytes_than_the_bound_is_refused_by_name(kept: Kept) -> None:
    ledger = kept.open()
    ledger.add(ledger.propose(largest(0)))
    for extra in ("x", "\N{GRINNING FACE}"):
        wide = Namespace.from_fields({**largest(1).to_fields(), "adapter": extra})
        with pytest.raises(UsageError) as caught:
            ledger.propose(wide)
        assert caught.value.code == "namespace_too_large"
        for text in (wide.id.hex(), wide.model, str(MAX_NAMESPACE_BYTES), "fingerprint"):
            assert text in caught.value.message
    assert len(kept.open().namespaces()) == 1


def test_namespace_that_an_older_daemon_took_is_kept_whatever_its_size(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_NAMESPACE_BYTES", 1 << 20)
        ledger = kept.open()
        wide = Namespace.from_fields({**largest(0).to_fields(), "adapter": "x" * 1000})
        ledger.add(ledger.propose(wide))
    assert kept.open().find(wide.id)


def test_tombstones_are_bounded_and_the_oldest_go_first(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 3)
    ledger = kept.open()
    ledger.bury((bytes([life]) * 16, life) for life in (4, 1, 3))
    ledger.bury([(b"x" * 16, 9)])
    expected = {b"\x04" * 16: 4, b"\x03" * 16: 3, b"x" * 16: 9}
    assert dict(ledger.tombstones()) == expected
    assert dict(kept.open().tombstones()) == expected


def test_tombstone_keeps_the_highest_life(kept: Kept) -> None:
    ledger = kept.open()
    ledger.bury([(b"a" * 16, 5)])
    ledger.bury([(b"a" * 16, 3)])
    assert dict(ledger.tombstones()) == {b"a" * 16: 5}


def test_moot_tombstones_are_pruned_for_good(kept: Kept) -> None:
    ledger = filled(kept)
    assert ledger.prune(9) == 1
    assert dict(kept.open().tombstones()) == {b"b" * 16: 9}


def test_end_of_the_log_is_noted_ahead_for_good_and_never_falls(kept: Kept) -> None:
    ledger = kept.open()
    assert ledger.log_end == 0  # there never was a log
    ledger.keep_ahead(0)
    assert kept.open().log_end == 0
    ahead = 7 + module.LOG_AHEAD
    kept.open_ones[-1].keep_ahead(7)
    for end in (0, 3, 7 + module.LOG_AHEAD // 2):  # no tier; an older log; not far from it
        ledger = kept.open()
        ledger.keep_ahead(end)
        assert ledger.log_end == ahead
    ledger.keep_ahead(8 + module.LOG_AHEAD // 2)
    assert kept.open().log_end > ahead


def test_noted_end_of_the_log_has_a_bound_and_fits_the_ledger(kept: Kept) -> None:
    ledger = kept.open()
    for end in (module.LOG_END_MAX - 1, (1 << 64) - 1):
        ledger.keep_ahead(end)
        assert kept.open().log_end == module.LOG_END_MAX
    assert (module.LOG_END_MAX >> 32) + (module.LOG_AHEAD >> 32) < 1 << 32  # lives are left


def test_balance_of_writes_is_there_at_the_next_start_with_what_came_in(kept: Kept) -> None:
    ledger = kept.open()
    assert ledger.write_balance() is None
    balance = WriteBalance(-250.5, 1_000)
    ledger.note_writes(balance)
    assert kept.open().write_balance() == balance
    day_ns = 86_400 * 10**9
    assert balance.left_at(1_000 + day_ns // 4, 1_000) == -0.5
    assert balance.left_at(1_000 + 9 * day_ns, 1_000) == 1_000
    assert balance.left_at(0, 1_000) == -250.5  # the clock went back
    assert WriteBalance(900.0, 0).left_at(0, 300) == 300  # of a larger budget


def damage(file: Path, kind: str, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    match kind:
        case "truncated":
            data = data[: rng.randrange(1, len(data) - 4096)]
        case "emptied":
            data.clear()
        case "zeroed":
            data = bytearray(len(data))
        case "random":
            data = bytearray(rng.randbytes(len(data)))
        case "value":  # inside records, in every copy of them: LMDB does not notice
            data = bytearray(data.replace(b'"layout"', b'"layouu"'))
        case "page":
            start = 4096 * rng.randrange(2, len(data) // 4096)
            data[start : start + 4096] = rng.randbytes(4096)
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["truncated", "emptied", "zeroed", "random", "value", "page"])
def test_damaged_ledger_is_set_aside_and_rebuilt(kept: Kept, kind: str, rng: random.Random) -> None:
    """Incident: LMDB maps its file, and a truncated one killed the process that opened it by
    SIGBUS, 40 times of 40."""
    before = facts(filled(kept))
    kept.close()
    damage(kept.file, kind, rng)
    ledger = kept.open()
    if kind in ("page", "truncated") and not ledger.lost:
        assert facts(ledger) == before  # what is gone held no record
        return
    assert ledger.lost
    assert ledger.health == "rebuilt"
    assert facts(ledger) == (before[0], [], {})  # the epoch stands in a file of its own
    events = [event for event in kept.events() if event["event"] == "ledger_rebuilt"]
    assert len(events) == 1
    assert os.path.exists(events[0]["kept"])
    ledger.add(ledger.propose(space(5)))
    again = kept.open()
    assert not again.lost
    assert [record.space for record in again.namespaces()] == [space(5)]


def test_any_flipped_byte_is_noticed_or_harmless(kept: Kept, rng: random.Random) -> None:
    before = facts(filled(kept))
    kept.close()
    sound = kept.file.read_bytes()
    for _ in range(25):
        data = bytearray(sound)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        kept.file.write_bytes(data)
        ledger = kept.open()
        assert facts(ledger) == ((before[0], [], {}) if ledger.lost else before)
        kept.close()


def test_damaged_ledgers_are_kept_but_not_all(kept: Kept) -> None:
    for _ in range(ledger_file.KEPT_DAMAGED + 2):
        filled(kept)
        kept.close()
        kept.file.write_bytes(b"no ledger")
    kept.open()
    names = [name for name in os.listdir(kept.file.parent) if "damaged" in name]
    assert len(names) == ledger_file.KEPT_DAMAGED


def test_ledger_of_another_warehouse_is_not_believed(kept: Kept) -> None:
    filled(kept)
    kept.close()
    other = Ledger(kept.directories, b"x" * 16, Log("json", kept.log), expected=False)
    assert other.lost
    assert other.namespaces() == []
    other.close()


def test_ledger_of_a_newer_version_is_refused_and_left_alone(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "VERSION", 2)
        filled(kept)
        kept.close()
    before = kept.file.read_bytes()
    with pytest.raises(StorageError) as caught:
        kept.open()
    assert caught.value.code == "newer_ledger"
    assert kept.file.read_bytes() == before


def test_missing_ledger_is_lost_only_beside_pages(kept: Kept) -> None:
    assert not kept.open(expected=False).lost
    kept.close()
    kept.file.unlink()
    assert kept.open(expected=True).lost


def test_ledger_that_cannot_be_probed_is_left_alone(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(kept)
    kept.close()
    before = kept.file.read_bytes()
    monkeypatch.setattr(ledger_file, "_PROBE", "/nonexistent/probe.py")
    with pytest.raises(StorageError) as caught:
        kept.open()
    assert caught.value.code == "ledger_probe_failed"
    assert kept.file.read_bytes() == before


def test_probe_that_hangs_is_ended_and_says_nothing_of_the_ledger(kept: Kept) -> None:
    filled(kept)
    kept.close()
    kept.file.unlink()
    os.mkfifo(kept.file)  # opening it for reading waits for a writer that never comes
    with pytest.raises(StorageError, match="took over"):
        ledger_file.read(str(kept.file), timeout_s=0.5)


def test_probe_that_cannot_be_killed_keeps_nobody_waiting(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a disk that does not answer takes no signal before it does."""
    os.mkfifo(kept.file)
    monkeypatch.setattr(ledger_file, "_KILLED_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda child: children.append(child))
        children: list[subprocess.Popen[bytes]] = []
        with pytest.raises(StorageError, match="took over"):
            ledger_file.read(str(kept.file), timeout_s=0.5)
    [child] = children
    assert child.poll() is None
    child.kill()
    child.wait()


def probe_that(does: str, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    script = kept.file.with_name("probe.py")
    script.write_text(f"import os, signal\n{does}\n")
    monkeypatch.setattr(ledger_file, "_PROBE", str(script))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGALRM", "SIGUSR1"])
def test_signal_that_ends_the_probe_is_no_damage(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Incident: Ctrl-C, a service manager's stop or the OOM killer at the start ended the child,
    and the daemon set a sound ledger aside and dropped every page."""
    filled(kept)
    kept.close()
    before = kept.file.read_bytes()
    # Whoever started the tests may ignore some of them (nohup), and children inherit that.
    default = "" if name == "SIGKILL" else f"signal.signal(signal.{name}, signal.SIG_DFL); "
    ends = f"{default}os.kill(os.getpid(), signal.{name})"
    probe_that(ends, kept, monkeypatch)
    with pytest.raises(StorageError) as caught:
        kept.open()
    assert caught.value.code == "ledger_probe_failed"
    assert kept.file.read_bytes() == before


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"])
def test_crash_of_the_probe_is_damage(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    filled(kept)
    probe_that(f"os.kill(os.getpid(), signal.{name})", kept, monkeypatch)
    assert kept.open().lost


def test_probe_is_out_of_reach_of_signals_to_the_daemons_group(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(kept)
    # Also to those that come before it has its session.
    deaf = "set((signal.SIGINT, signal.SIGTERM)) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())"
    says = f"raise SystemExit(f'own={{os.getsid(0) == os.getpid()}} deaf={{{deaf}}}')"
    probe_that(says, kept, monkeypatch)
    with pytest.raises(StorageError, match="own=True deaf=True"):
        kept.open()


def test_ledger_goes_on_in_memory_when_its_disk_refuses_and_catches_up(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = filled(kept)

    def refuse(*_: object) -> None:
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_file.LedgerFile, "commit", refuse)
        assert ledger.raise_epoch([space(0).id]) == (2, False)
        ledger.add(ledger.propose(space(2)))
        assert ledger.health == "in_memory"
        assert "No space" in ledger.reason
        ledger.heal()
        assert ledger.health == "in_memory"
    now = facts(ledger)
    assert ledger.find(space(2).id) is not None
    ledger.heal()
    assert ledger.health == "ok"
    assert facts(kept.open()) == now
    degraded = [event for event in kept.events() if event["event"] == "ledger_degraded"]
    assert len(degraded) == 1


def test_ledger_opens_in_memory_where_nothing_can_be_written(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = facts(filled(kept))
    kept.close()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_file.lmdb, "open", refuse)
        ledger = kept.open()
        assert ledger.health == "in_memory"
        assert not ledger.lost
        assert facts(ledger) == before


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Kept]:
    for name in ("nvme", "arena"):
        (tmp_path / name).mkdir()
    both = Kept(tmp_path / "nvme", tmp_path / "arena")
    yield both
    both.close()


def test_ledger_is_whole_in_each_directory(both: Kept, tmp_path: Path) -> None:
    """Incident: it was on NVMe alone, and a replaced disk cost what the arena held."""
    before = facts(filled(both))
    both.close()
    for name in ("nvme", "arena"):
        for lost in (lambda file: file.unlink(), lambda file: file.write_bytes(b"no ledger")):
            lost(tmp_path / name / ledger_file.FILE_NAME)
            ledger = both.open(expected=True)
            assert not ledger.lost
            assert facts(ledger) == before
            both.close()
    for name in ("nvme", "arena"):
        (tmp_path / name / ledger_file.FILE_NAME).unlink()
    assert both.open(expected=True).lost


def test_ledger_that_was_detached_undoes_no_clear_and_no_tombstone(
    both: Kept, tmp_path: Path
) -> None:
    """Incident: of two the one that was opened more often counted, which was the detached one."""
    filled(both)
    both.open()
    both.close()
    arena = Kept(tmp_path / "arena")
    alone = arena.open(expected=True)
    alone.bury([(b"a" * 16, 7)])
    alone.add(alone.propose(space(2)))
    alone.raise_epoch([space(0).id])
    now = facts(alone)
    arena.close()
    for _ in range(2):
        assert facts(both.open(expected=True)) == now
        both.close()


def test_end_of_the_log_is_known_beside_either_tier(both: Kept, tmp_path: Path) -> None:
    both.open().keep_ahead(7)
    both.close()
    (tmp_path / "nvme" / ledger_file.FILE_NAME).unlink()
    assert Kept(tmp_path / "arena").open().log_end == 7 + module.LOG_AHEAD
    later = 7 + 3 * module.LOG_AHEAD
    nvme = Kept(tmp_path / "nvme")
    nvme.open().keep_ahead(later)
    nvme.close()
    for _ in range(2):
        assert both.open(expected=True).log_end == later + module.LOG_AHEAD


def test_detached_ledger_takes_the_floor_of_one_that_was_made_meanwhile(
    both: Kept, tmp_path: Path
) -> None:
    filled(both)
    both.close()
    (tmp_path / "arena" / ledger_file.FILE_NAME).unlink()
    arena = Kept(tmp_path / "arena")
    alone = arena.open()
    alone.add(alone.propose(space(1)))
    for _ in range(3):
        alone.raise_epoch(None)
    arena.close()
    ledger = both.open(expected=True)
    assert (ledger.epoch, ledger.floor) == (3, 3)
    cleared = {record.space: record.clear_epoch for record in ledger.namespaces()}
    assert cleared == {space(0): 3, space(1): 3}


def test_ledger_that_was_detached_brings_a_forgotten_name_back_empty(
    both: Kept, tmp_path: Path
) -> None:
    filled(both)
    for _ in range(3):
        both.open()  # the one that is detached was opened more often
    both.close()
    arena = Kept(tmp_path / "arena")
    alone = arena.open(expected=True)
    alone.forget([space(0).id])
    alone.add(alone.propose(space(5)))
    arena.close()
    for _ in range(2):
        ledger = both.open(expected=True)
        assert (ledger.epoch, ledger.floor) == (2, 2)
        epochs = {record.space: record.clear_epoch for record in ledger.namespaces()}
        assert epochs == {space(0): 2, space(1): 1, space(5): 2}


@pytest.mark.parametrize("behind", ["nvme", "arena"])
def test_daemon_that_died_between_the_copies_of_a_forget_agrees_with_itself_again(
    both: Kept, tmp_path: Path, behind: str
) -> None:
    ledger = filled(both)
    file = tmp_path / behind / ledger_file.FILE_NAME
    before = file.read_bytes()
    ledger.forget([space(1).id])
    both.close()
    file.write_bytes(before)
    now = facts(both.open(expected=True))
    assert now[0] == 2
    assert {entry[1]: entry[2] for entry in now[1]} == {space(0): 0, space(1): 2}
    both.close()
    for name in ("nvme", "arena"):
        alone = Kept(tmp_path / name)
        assert facts(alone.open(expected=True)) == now
        alone.close()


def test_clears_of_what_does_not_fit_a_merged_ledger_are_kept_as_its_floor(
    both: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_NAMESPACES", 2)
    filled(both)
    both.close()
    (tmp_path / "arena" / ledger_file.FILE_NAME).unlink()
    arena = Kept(tmp_path / "arena")
    alone = arena.open()
    alone.add(alone.propose(space(7)))
    for _ in range(4):
        alone.raise_epoch([space(7).id])
    arena.close()
    ledger = both.open(expected=True)
    assert ledger.find(space(7).id) is None
    assert ledger.floor == 4


def test_copy_whose_disk_refuses_is_told_and_catches_up(both: Kept, tmp_path: Path) -> None:
    ledger = filled(both)
    (tmp_path / "arena").rename(tmp_path / "away")
    ledger._copies[1].close()
    assert ledger.raise_epoch([space(0).id]) == (2, True)  # the first directory has it
    assert ledger.health == "in_memory"
    (tmp_path / "away").rename(tmp_path / "arena")
    ledger.heal()
    assert ledger.health == "ok"
    now = facts(ledger)
    both.close()
    assert facts(Kept(tmp_path / "arena").open()) == now


class LateCalls(DiskCalls):
    """The first call is late for as long as `hangs`."""

    def __init__(self, answer_s: float) -> None:
        super().__init__(answer_s)
        self.hangs = False
        self.late: Callable[[], object] | None = None

    def wait_for(self, call: Callable[[], Any]) -> Any:
        if not self.hangs:
            return super().wait_for(call)
        self.late = self.late or call
        raise LateDiskError(errno.ETIMEDOUT, "the disk has not answered")


def test_ledger_goes_on_in_memory_when_its_disk_does_not_answer_and_catches_up(
    both: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: it waited for the disk, and all who asked it for something waited for it."""
    monkeypatch.setattr(module, "DiskCalls", LateCalls)
    ledger = filled(both)
    first, second = (cast(LateCalls, calls) for calls in ledger.calls.values())
    first.hangs = True
    assert ledger.raise_epoch([space(0).id]) == (2, False)
    ledger.add(ledger.propose(space(2)))
    ledger.heal()
    assert (ledger.health, ledger.reason) == ("in_memory", "[Errno 110] the disk has not answered")
    now = facts(ledger)
    first.hangs = False
    assert first.late is not None
    assert second.late is None
    first.late()  # what it was asked for happens in the end
    ledger.heal()
    assert ledger.health == "ok"
    both.close()
    assert facts(Kept(Path(both.directories[0])).open()) == now
    assert facts(both.open()) == now
    assert [event["event"] for event in both.events()] == ["ledger_degraded"]


class HeldCalls(DiskCalls):
    """What is asked of the disk from `hold()` on is answered once it `answers`."""

    def hold(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def wait_for(self, call: Callable[[], Any]) -> Any:
        if hasattr(self, "asked"):
            self.asked.set()
            assert self.answers.wait(DEADLINE_S)
        return super().wait_for(call)


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: ledger.add(ledger.propose(space(2))),
        lambda ledger: ledger.raise_epoch(None),
        lambda ledger: ledger.forget([space(0).id]),
        lambda ledger: ledger.keep_ahead(1),
        lambda ledger: ledger.bury([(b"c" * 16, 7)]),
        lambda ledger: ledger.prune(7),
    ],
    ids=["add", "raise_epoch", "forget", "keep_ahead", "bury", "prune"],
)
def test_ledger_is_read_while_a_change_waits_for_its_disk(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, change: Callable[[Ledger], object]
) -> None:
    """Incident: every call over gRPC waited behind it, because each asks for its namespace."""
    monkeypatch.setattr(module, "DiskCalls", HeldCalls)
    ledger = filled(kept)
    [calls] = (cast(HeldCalls, calls) for calls in ledger.calls.values())
    calls.hold()
    with ThreadPoolExecutor(2) as threads:
        changing = threads.submit(change, ledger)
        try:
            assert calls.asked.wait(DEADLINE_S)
            assert threads.submit(ledger.find, space(1).id).result(DEADLINE_S)
            seen = threads.submit(facts, ledger).result(DEADLINE_S)
            assert not changing.done()
        finally:
            calls.answers.set()
        changing.result(DEADLINE_S)
    assert facts(ledger) == seen
    assert facts(kept.open()) == seen


def test_epoch_survives_the_loss_of_the_whole_ledger_file(kept: Kept) -> None:
    epoch = facts(filled(kept))[0]
    kept.close()
    os.unlink(kept.file)
    ledger = kept.open(expected=True)
    assert ledger.lost
    assert ledger.epoch == epoch > 0


def test_damaged_epoch_file_is_ignored(kept: Kept) -> None:
    before = facts(filled(kept))
    kept.close()
    file = kept.file.parent / "epoch"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert facts(kept.open()) == before

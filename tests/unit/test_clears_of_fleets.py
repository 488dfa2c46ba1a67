"""What was cleared stays away on all hosts of a fleet, wherever a daemon, its worker or the store
ends: the real ledger, file, markers and decisions over a model of the core."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.epochs import list_markers
from testkit import fleet_hosts
from testkit.fleet_hosts import NAMES, Ended, Fleet, Host


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet_hosts.patch(monkeypatch)
    monkeypatch.setattr("kvwarehouse.atomic_file.os.fsync", lambda fd: None)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    made = Fleet(tmp_path, hosts=2)
    for host in made.hosts:
        host.warehouse.open_namespace(made.spaces[0])
    made.settle(2)
    return made


def warm(fleet: Fleet) -> bytes:
    """Each host has a page, and has put it."""
    name = fleet.spaces[0].id
    for host in fleet.hosts:
        host.compute(name)
        host.take(name, 0)
        host.put()
    return name


def epoch_of(host: Host, name: bytes) -> int | None:
    space = host.core.space(name)
    return space.remote_epoch if space else None


def markers(fleet: Fleet) -> list[int]:
    return sorted(each.epoch for of in list_markers(fleet.store, NAMES).values() for each in of)


def test_namespace_that_nobody_has_cleared_is_served_at_epoch_0(fleet: Fleet) -> None:
    name = warm(fleet)
    assert [epoch_of(host, name) for host in fleet.hosts] == [0, 0]
    assert [sorted(host.served(name)) for host in fleet.hosts] == [[1, 2], [1, 2]]
    assert markers(fleet) == []


def test_clear_on_one_host_is_one_on_all(fleet: Fleet) -> None:
    name = warm(fleet)
    first, second = fleet.hosts
    clear = fleet.clear(first, name)
    assert (first.own(name), first.served(name), epoch_of(first, name)) == ([], [], None)
    first.tend()
    clear.look(0)
    assert clear.done_s is not None
    assert epoch_of(first, name) == markers(fleet)[-1]
    fleet.settle(2)
    assert (second.own(name), second.served(name)) == ([], [])
    assert epoch_of(second, name) == epoch_of(first, name) == markers(fleet)[-1]
    assert len(markers(fleet)) == 1
    warm(fleet)
    assert sorted(first.served(name)) == sorted(second.served(name)) != []


def test_clear_while_there_is_no_worker_is_owed_and_written_by_the_next(fleet: Fleet) -> None:
    name = warm(fleet)
    first, second = fleet.hosts
    first.end_worker()
    clear = fleet.clear(first, name)
    first.restart()
    assert first.clears.owed == 1
    second.tend()
    assert len(second.own(name)) == 1
    fleet.settle(3)
    assert clear.done_s is None or first.clears.owed == 0
    assert [host.own(name) for host in fleet.hosts] == [[], []]
    assert first.clears.owed == 0
    assert len(markers(fleet)) == 1


def test_owed_clear_of_a_namespace_that_was_forgotten_is_written(fleet: Fleet) -> None:
    name = warm(fleet)
    first, second = fleet.hosts
    first.end_worker()
    fleet.clear(first, name, forget=True)
    assert first.ledger.find(name) is None
    first.restart()
    assert first.clears.owed == 1
    fleet.settle(3)
    assert (first.clears.owed, second.own(name), second.served(name)) == (0, [], [])
    first.warehouse.open_namespace(fleet.spaces[0])
    fleet.settle(2)
    assert epoch_of(first, name) == epoch_of(second, name) == markers(fleet)[-1]
    assert first.served(name) == []


def test_host_that_clears_after_it_was_away_clears_what_others_have_meanwhile(
    fleet: Fleet,
) -> None:
    """Its marker goes above theirs, so nobody would tell it any more."""
    name = warm(fleet)
    first, second = fleet.hosts
    first.is_cut_off = True
    fleet.clear(first, name)
    first.compute(name)  # older than the next clear
    fleet.clear(second, name)
    second.tend()
    fleet.settle(4)
    assert [host.own(name) for host in fleet.hosts] == [[], []]


def test_host_whose_marker_the_store_does_not_take_clears_what_others_have(fleet: Fleet) -> None:
    name = warm(fleet)
    first, second = fleet.hosts
    fleet.clear(first, name)
    first.compute(name)
    fleet.clear(second, name)
    second.tend()
    fleet.store.put, put = lambda *args, **named: False, fleet.store.put  # type: ignore[method-assign]
    first.tend()
    assert first.own(name) == []
    assert first.clears.owed == 1
    assert epoch_of(first, name) is None
    fleet.store.put = put  # type: ignore[method-assign]
    fleet.settle(3)
    assert first.clears.owed == 0


def test_marker_that_is_gone_from_the_store_is_written_again(fleet: Fleet) -> None:
    name = warm(fleet)
    fleet.clear(fleet.hosts[0], name)
    fleet.settle(2)
    had = markers(fleet)
    fleet.store.delete(fleet.store.names())  # somebody has emptied it
    fleet.settle(2)
    assert markers(fleet) == had
    for host in fleet.hosts:
        host.end_worker()
    fleet.store.delete(fleet.store.names())
    fleet.hosts[0].start_worker()  # which has not listed it, and is told
    fleet.settle(2)
    assert markers(fleet) == had
    assert fleet.hosts[0].ledger.epoch == 1


def test_host_that_was_cleared_before_it_had_the_tier_owes_that_to_the_fleet(
    fleet: Fleet,
) -> None:
    name = warm(fleet)
    first = fleet.hosts[0]
    without = first.warehouse
    without._clears = None
    without.clear(first.ledger.find(name))
    without._clears = first.clears
    first.restart()
    assert first.clears.owed == 1
    fleet.settle(3)
    assert len(markers(fleet)) == 1
    (first.folder / "remote_clears").unlink()  # as at the first start with it
    first.restart()
    assert first.clears.owed == 1


def test_namespaces_that_come_later_owe_nothing(fleet: Fleet) -> None:
    name = warm(fleet)
    first = fleet.hosts[0]
    fleet.clear(first, name, forget=True)
    first.warehouse.open_namespace(fleet.spaces[0])  # under a floor that is not 0
    fleet.settle(3)
    had = markers(fleet)
    first.restart()
    assert first.clears.owed == 0
    fleet.settle(3)
    assert markers(fleet) == had


def test_damaged_file_owes_every_clear_once_more(fleet: Fleet) -> None:
    name = warm(fleet)
    first = fleet.hosts[0]
    fleet.clear(first, name)
    fleet.settle(2)
    (first.folder / "remote_clears").write_text("{}")
    first.restart()
    assert first.clears.owed == 1
    assert "remote_clears_lost" in first.log.getvalue()
    assert len(list(first.folder.glob("remote_clears.damaged-*"))) == 1


def test_clear_of_everything_reaches_what_the_host_does_not_know(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, hosts=2, spaces=2)
    first, second = fleet.hosts
    known, unknown = fleet.spaces
    first.warehouse.open_namespace(known)
    for space in fleet.spaces:
        second.warehouse.open_namespace(space)
    fleet.settle(2)
    for space in fleet.spaces:
        second.compute(space.id)
        second.take(space.id, 0)
        second.put()
    first.end_worker()
    fleet.clear(first, known.id)
    fleet.clear(first, None)
    assert first.clears.owed == 1
    fleet.settle(3)
    assert len(markers(fleet)) == 1
    first.warehouse.open_namespace(unknown)
    fleet.settle(1)
    for host in fleet.hosts:
        for space in fleet.spaces:
            assert (host.own(space.id), host.served(space.id)) == ([], [])
            assert epoch_of(host, space.id) == markers(fleet)[0]
    had = markers(fleet)
    fleet.store.delete(fleet.store.names())
    for host in fleet.hosts:
        host.restart()
    fleet.settle(2)
    assert had[0] in markers(fleet)


def test_namespace_that_is_new_is_served_at_once_at_its_epoch(fleet: Fleet) -> None:
    fleet.clear(fleet.hosts[0], None)
    fleet.settle(2)
    other = fleet_hosts.space(7)
    first = fleet.hosts[0]
    first.warehouse.open_namespace(other)
    first.compute(other.id)
    first.pass_()
    assert epoch_of(first, other.id) == markers(fleet)[-1]
    assert len(first.own(other.id)) == 1
    first.restart()
    fleet.settle(2)
    assert len(first.own(other.id)) == 1


def test_clear_again_before_the_first_is_answered_is_owed_still(fleet: Fleet) -> None:
    name = warm(fleet)
    first, second = fleet.hosts
    fleet.clear(first, name)
    first.pass_()
    first.round()  # it is written, and the daemon has not heard so
    fleet.clock.pass_by(5)
    second.tend()
    second.compute(name)
    second.take(name, 0)
    second.put()
    again = fleet.clear(first, name)
    first.pass_()
    again.look(fleet.clock())
    assert again.done_s is None
    fleet.settle(3)
    assert [host.own(name) for host in fleet.hosts] == [[], []]
    assert second.served(name) == []


def test_host_that_ended_while_it_followed_has_nothing_older_from_its_start_on(
    fleet: Fleet,
) -> None:
    name = warm(fleet)
    first, second = fleet.hosts
    fleet.clear(first, name)
    first.tend()
    fleet.clock.pass_by(5)
    second.round()
    second.ledger._write_epoch = _end  # noted, and not in the ledger
    with pytest.raises(Ended):
        second.pass_()
    second.restart()
    assert second.own(name) == []
    fleet.settle(2)
    assert second.clears.owed == 0
    assert len(markers(fleet)) == 1


def test_marker_of_a_clear_that_never_came_here_clears_here_too(fleet: Fleet) -> None:
    """It was written before the ledger had the clear, and the daemon has ended in between."""
    name = warm(fleet)
    first = fleet.hosts[0]
    first.clears.note({name}, first.ledger.epoch + 1)
    first.tend()
    first.restart()
    fleet.settle(2)
    assert [host.own(name) for host in fleet.hosts] == [[], []]
    assert len(markers(fleet)) == 1


def test_pages_of_a_namespace_that_a_lost_ledger_had_are_cleared_before_it_is_open(
    fleet: Fleet,
) -> None:
    first, second = fleet.hosts
    other = fleet_hosts.space(7)
    first.core.add_namespace(5, other.id, 4, 1, 8, 0)
    first.compute(other.id)
    second.warehouse.open_namespace(other)
    fleet.clear(second, other.id)
    fleet.settle(2)
    assert len(first.core.space(other.id).pages) == 1  # and nobody can read them
    first.warehouse.open_namespace(other)
    assert first.own(other.id) == []
    fleet.settle(2)
    assert epoch_of(first, other.id) == markers(fleet)[-1]


def _end() -> bool:
    raise Ended


@pytest.mark.parametrize("behind_ms", [0, 3_600_000])
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("began", ["sooner", "later"])
def test_clears_of_two_hosts_at_a_time_clear_both(
    fleet: Fleet, at: int, began: str, behind_ms: int
) -> None:
    """`at`: before that call of the one to the store the other does all of its own. `began`: when
    that one was cleared."""
    name = warm(fleet)
    first, second = fleet.hosts
    first.behind_ms = behind_ms
    if began == "sooner":
        fleet.clear(second, name)
        second.compute(name)  # before the clear of the other
        second.pass_()
    fleet.clear(first, name)
    first.compute(name)  # before the clear of the other
    first.pass_()
    calls = 0

    def meanwhile() -> None:
        nonlocal calls
        if calls == at:
            if began == "later":
                second.compute(name)
                fleet.clear(second, name)
            second.tend()
            second.take(name, 0)
            second.put()
        calls += 1

    first.between = meanwhile
    first.round()
    first.between = lambda: None
    first.pass_()
    fleet.check()
    fleet.settle(4)
    assert [host.own(name) for host in fleet.hosts] == [[], []]
    assert epoch_of(first, name) == epoch_of(second, name) == markers(fleet)[-1]


def test_worker_is_told_that_a_listing_was_heard_when_nothing_older_is_served(
    fleet: Fleet,
) -> None:
    name = warm(fleet)
    first, second = fleet.hosts
    fleet.clear(first, name)
    first.tend()
    fleet.clock.pass_by(5)
    second.round()
    tell, heard = second.clears._tell, []

    def told(line: object) -> bool:
        heard.append((type(line).__name__, epoch_of(second, name)))
        return bool(tell(line))

    second.clears._tell = told
    second.pass_()
    assert heard == [("EpochsHeard", None)]


SCENARIO_STEPS = 130
"""More than there are: those beyond say so."""


@pytest.mark.parametrize("what", ["daemon", "worker"])
@pytest.mark.parametrize("role", ["clears", "follows", "forgets"])
def test_end_at_any_step_of_a_clear_brings_nothing_back(
    tmp_path: Path, what: str, role: str
) -> None:
    at = 1
    while _ends_at(tmp_path / str(at), at, what, role):
        at += 1
        assert at < SCENARIO_STEPS
    assert at > 10


def _ends_at(folder: Path, at: int, what: str, role: str) -> bool:
    """False: there are not so many steps."""
    folder.mkdir()
    fleet = Fleet(folder, hosts=2)
    for host in fleet.hosts:
        host.warehouse.open_namespace(fleet.spaces[0])
    fleet.settle(2)
    name = warm(fleet)
    first, second = fleet.hosts
    ending = second if role == "follows" else first
    ending.steps.begin(at)
    for step in (
        lambda: fleet.clear(first, name, forget=role == "forgets"),
        first.pass_, first.round, first.pass_,
        lambda: fleet.clock.pass_by(5),
        second.round, second.pass_, second.round, second.pass_,
    ):  # fmt: skip
        try:
            step()
        except Ended:
            ending.restart()
        if ending.epochs is None:
            if what == "daemon":
                ending.restart()
            ending.start_worker()
        fleet.check()
        fleet.check_here()
    ended = ending.steps.ends_at is None
    fleet.settle(4)
    if fleet.clears:
        assert [host.own(name) for host in fleet.hosts] == [[], []], at
        assert first.clears.owed == 0
    first.warehouse.open_namespace(fleet.spaces[0])
    fleet.settle(2)
    warm(fleet)
    fleet.settle(2)
    epochs = [epoch_of(host, name) for host in fleet.hosts]
    assert epochs[0] is not None, at
    assert epochs[0] == epochs[1], at
    for host in fleet.hosts:
        host.end()
    return ended


@pytest.mark.parametrize("seed", range(16))
def test_hosts_that_clear_and_end_at_random_bring_nothing_back(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(tmp_path, hosts=rng.choice([2, 3]), spaces=2)
    for host in fleet.hosts:
        for space in fleet.spaces:
            host.warehouse.open_namespace(space)
    fleet.settle(1)
    for host in fleet.hosts:
        host.behind_ms = rng.choice([0, 0, 500, 3_600_000])
        host.between = lambda: _meanwhile(rng, fleet)
    fleet.store.fails = lambda number: rng.random() < fails
    for _ in range(120):
        fails = rng.choice([0.0, 0.0, 0.3])
        fleet.store.after = rng.random() < 0.5
        host = rng.choice(fleet.hosts)
        name = rng.choice(fleet.spaces).id
        host.steps.begin(rng.randrange(1, 30) if rng.random() < 0.15 else None)
        try:
            _act(rng, fleet, host, name)
        except Ended:
            host.restart()
        fails = 0.0
        host.steps.begin(None)
        fleet.check()
        fleet.check_here()
    fails = 0.0
    for host in fleet.hosts:
        host.between = lambda: None
    fleet.settle()
    assert [host.clears.owed for host in fleet.hosts] == [0] * len(fleet.hosts)
    for space in fleet.spaces:
        last = max((c.at for c in fleet.clears if space.id in c.names), default=0)
        for host in fleet.hosts:
            assert [at for at in (*host.own(space.id), *host.served(space.id)) if at < last] == []
        epochs = {epoch_of(h, space.id) for h in fleet.hosts if h.ledger.find(space.id)}
        assert len(epochs) <= 1
        assert None not in epochs
    for host in fleet.hosts:
        host.end()


def _act(rng: random.Random, fleet: Fleet, host: Host, name: bytes) -> None:
    acts: list[tuple[float, Callable[[], object]]] = [
        (6, lambda: host.compute(name)),
        (5, lambda: host.take(name, rng.randrange(8))),
        (5, lambda: _quietly(host.put)),
        (5, lambda: host.fetch(name, rng.randrange(8))),
        (5, host.fill),
        (2, lambda: _clear(rng, fleet, host, name)),
        (10, host.round),
        (10, host.pass_),
        (2, lambda: host.end_worker() if host.epochs else host.start_worker()),
        (5, lambda: fleet.clock.pass_by(rng.choice([0.1, 1.0, 5.0, 11.0]))),
        (0.5, host.restart),
        (1, host.cut_off_or_on),
        (1, lambda: [host.warehouse.open_namespace(space) for space in fleet.spaces]),
        (1, fleet.tend),
    ]
    (act,) = rng.choices([act for _, act in acts], [weight for weight, _ in acts])
    act()


def _clear(rng: random.Random, fleet: Fleet, host: Host, name: bytes) -> None:
    one = name if rng.random() < 0.8 and host.ledger.find(name) else None
    fleet.clear(host, one, forget=rng.random() < 0.3)


def _meanwhile(rng: random.Random, fleet: Fleet) -> None:
    """What another host does while one waits for the store."""
    if rng.random() > 0.1:
        return
    host = rng.choice(fleet.hosts)
    name = rng.choice(fleet.spaces).id
    between, host.between = host.between, lambda: None
    try:
        what = rng.choice(["clear", "tend", "compute", "take"])
        if what == "clear" and host.ledger.find(name):
            fleet.clear(host, name)
        elif what == "compute":
            host.compute(name)
        elif what == "take":
            host.take(name, 0)
            _quietly(host.put)
        elif not host.is_in_round:
            host.tend()
    finally:
        host.between = between


def _quietly(do: Callable[[], object]) -> None:
    """The store may be wanted to fail."""
    with contextlib.suppress(TransportError):
        do()

"""`kvwarehouse remote`: over a folder, as an operator runs it."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.errors import TransportError
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import ObjectStore, StoreSettings, open_store
from testkit.fleet_secrets import secret_file
from testkit.remote_objects import made_object
from testkit.served import Served

pytestmark = pytest.mark.usefixtures("listed_without_pauses")


def day_of(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))


@dataclass
class Place:
    folder: Path
    secret: FleetSecret
    names: FleetNames
    store: ObjectStore
    flags: tuple[str, ...]

    def fill(self, rng: random.Random, count: int, days: tuple[int, ...] = (0,)) -> list[PagesName]:
        """`days`: how many days ago, in turns. As of now: a run may go on over midnight."""
        made, today = [], int(time.time() // 86400)
        for at in range(count):
            space = bytes([at % 2]) * 16
            name, data = made_object(self.secret, space, today - days[at % len(days)], rng)
            self.store.put(self.names.pages(name), data)
            made.append(name)
        return made

    def files(self) -> list[str]:
        return sorted(item.name for item in self.store.list(""))

    def path(self, name: PagesName) -> Path:
        return self.folder / self.names.pages(name)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in ("KVW_CONFIG", "KVW_REMOTE", "KVW_FLEET_SECRET"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "shared"
    folder.mkdir()
    file = secret_file(tmp_path, data=b"s" * 32)
    secret = FleetSecret.derive(b"s" * 32)
    url = f"file://{folder}"
    return Place(
        folder,
        secret,
        FleetNames(secret.fleet_id),
        open_store(StoreSettings(url)),
        ("--remote", url, "--fleet-secret", file),
    )


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `remote`; returns its exit status and what it printed (--json: decoded)."""

    def run(*arguments: str) -> tuple[int, Any]:
        status = main(["remote", *arguments])
        text = capsys.readouterr().out
        return status, json.loads(text) if "--json" in arguments else text

    return run


# --- init


def test_init_tries_each_call_and_leaves_nothing(place: Place, shown: Any) -> None:
    status, text = shown("init", *place.flags)
    assert status == Exit.OK
    for call in ("put", "get", "list", "copy", "delete"):
        assert f"{call} " in text
    assert text.count("works") == 5
    assert place.secret.fleet_id.hex() in text
    assert f"find {place.folder}/v1/{place.secret.fleet_id.hex()} -type f" in text
    assert "-mtime +8 -delete" in text
    assert list(place.folder.iterdir()) == []


def test_init_as_json_has_the_rule(place: Place, shown: Any) -> None:
    status, found = shown("init", *place.flags, "--remote-ttl", "3d", "--json")
    assert status == Exit.OK
    assert found["works"]
    assert found["put_if_absent"]
    assert abs(found["clock_ahead_s"]) < 60
    assert set(found["calls"].values()) == {"ok"}
    assert found["lifecycle"]["days"] == 4
    assert found["lifecycle"]["rule"] == {}


def test_store_that_takes_no_puts_is_bad_news_and_says_why(
    place: Place, shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place.folder / "v1"
    file.write_bytes(b"in the way")
    for action in ("init", "check"):
        status, found = shown(action, *place.flags, "--json")
        assert status == Exit.FOUND
        assert not found["works"]
        assert found["calls"]["put"].startswith("put: file://")
        status, text = shown(action, *place.flags)
        assert status == Exit.FOUND
        assert "docs/shared.md" in text


def test_store_is_found_by_the_daemons_file_or_the_environment(
    place: Place, shown: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url, _, secret = place.flags
    file = tmp_path / "kvw.toml"
    file.write_text(
        f'remote = "{url}"\nfleet_secret = "{secret}"\nremote_capacity = "1GiB"\ndram = "1GiB"\n'
    )
    assert shown("init", "--config", str(file), "--json")[1]["works"]
    monkeypatch.setenv("KVW_REMOTE", url)
    monkeypatch.setenv("KVW_FLEET_SECRET", secret)
    assert shown("init", "--json")[1]["works"]


# --- check


def test_check_counts_and_verifies_what_is_there(
    place: Place, shown: Any, rng: random.Random
) -> None:
    names = place.fill(rng, 10, days=(0, 1, 1))
    status, found = shown("check", *place.flags, "--json")
    assert status == Exit.OK
    total = sum(place.path(name).stat().st_size for name in names)
    assert (found["objects"], found["bytes"]) == (10, total)
    assert sum(day["objects"] for day in found["days"].values()) == 10
    assert set(found["days"]) == {day_of(name.day * 86400) for name in names}
    assert set(found["namespaces"]) == {(b"\0" * 16).hex(), (b"\1" * 16).hex()}
    assert found["verified"] == {
        "objects": 10, "bytes": total, "pages": 40, "gone": 0, "damaged": 0
    }  # fmt: skip
    status, text = shown("check", *place.flags)
    assert status == Exit.OK
    assert "verified 10 of 10 objects" in text
    assert "0 damaged" in text


def test_check_of_a_sample_reads_no_more_than_was_asked_for(
    place: Place, shown: Any, rng: random.Random
) -> None:
    place.fill(rng, 10)
    for count in (0, 3):
        _, found = shown("check", *place.flags, "--objects", str(count), "--json")
        assert (found["objects"], found["verified"]["objects"]) == (10, count)


def test_check_of_an_empty_store_is_well(place: Place, shown: Any) -> None:
    status, found = shown("check", *place.flags, "--json")
    assert status == Exit.OK
    assert (found["objects"], found["verified"]["objects"]) == (0, 0)
    assert shown("check", *place.flags)[0] == Exit.OK


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: data[:-1], "size"),
        (lambda data: b"", "size"),
        (lambda data: b"\0" * len(data), "header"),
        (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "header"),
        (lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "digest"),
        (lambda data: data[12288:] + data[:12288], "place"),
        (None, "chain"),  # another object under its name
    ],
)
def test_check_finds_damage_and_says_where(
    place: Place, shown: Any, rng: random.Random, damage: Any, fault: str
) -> None:
    first, second, third = place.fill(rng, 3)[:3]
    file = place.path(first)
    # The third is of the first one's namespace.
    file.write_bytes(damage(file.read_bytes()) if damage else place.path(third).read_bytes())
    status, found = shown("check", *place.flags, "--json")
    assert status == Exit.FOUND
    assert found["verified"]["damaged"] == 1
    (bad,) = found["damaged"]
    assert (bad["key"], bad["fault"]) == (first.key.hex(), fault)
    status, text = shown("check", *place.flags)
    assert status == Exit.FOUND
    assert place.names.pages(first)[-20:] in text
    assert place.names.pages(second)[-20:] not in text


def test_check_counts_no_object_of_another_fleet(
    place: Place, shown: Any, rng: random.Random, tmp_path: Path
) -> None:
    place.fill(rng, 2)
    other = secret_file(tmp_path, "other", b"o" * 32)
    _, found = shown("check", *place.flags[:3], other, "--json")
    assert found["objects"] == 0


# --- gc


def test_gc_deletes_what_is_over_and_no_more(place: Place, shown: Any, rng: random.Random) -> None:
    old = place.fill(rng, 2, days=(9,))
    new = place.fill(rng, 2, days=(0, 6))  # over midnight, too
    place.store.put(place.names.delta(0, 1), b"old")
    foreign = place.names.pages(old[0]) + ".mine"
    place.store.put(foreign, b"foreign")
    before = place.files()
    status, found = shown("gc", *place.flags, "--dry-run", "--json")
    counted = {"pages": 2, "markers": 0, "deltas": 1, "nodes": 0, "turns": 0, "probes": 0}
    assert (status, found["objects"], found["dry_run"]) == (Exit.OK, counted, True)
    assert place.files() == before
    status, text = shown("gc", *place.flags)
    assert status == Exit.OK
    assert "deleted 2 objects of pages" in text
    assert place.files() == sorted([*map(place.names.pages, new), foreign])


def test_gc_makes_room_where_a_capacity_is_named(
    place: Place, shown: Any, rng: random.Random
) -> None:
    names = place.fill(rng, 3, days=(2, 1, 0))
    size = place.path(names[0]).stat().st_size
    _, found = shown("gc", *place.flags, "--remote-capacity", f"{3 * size}", "--json")
    assert found["objects"]["pages"] == 1
    assert found["pages_bytes"] == size
    assert len(found["days_for_room"]) == 1
    assert place.files() == sorted(map(place.names.pages, names[1:]))
    _, text = shown("gc", *place.flags, "--remote-capacity", f"{size}", "--dry-run")
    assert "for room" in text
    assert len(place.files()) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--dry-run",), "1 objects would go; run it again"),
        ((), "1 objects are deleted; run it again"),
    ],
)
def test_gc_that_fails_says_how_far_it_came_and_no_dry_run_that_it_deleted(
    place: Place,
    rng: random.Random,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    said: str,
) -> None:
    place.fill(rng, 1, days=(9,))
    whole = ObjectStore.list

    def until_deltas(store: ObjectStore, prefix: str, *more: Any, **also: Any) -> Any:
        if prefix == place.names.deltas_prefix:
            raise TransportError("list: 503 Slow Down", code="remote_failed")
        return whole(store, prefix, *more, **also)

    monkeypatch.setattr(ObjectStore, "list", until_deltas)
    assert main(["remote", "gc", *place.flags, *flags]) == Exit.NO_DAEMON
    assert said in capsys.readouterr().err


@pytest.fixture
def full(place: Place, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on the store takes no put."""

    def put(*unused: Any, **also: Any) -> bool:
        raise TransportError("put: 507 Insufficient Storage", code="remote_full")

    return lambda: monkeypatch.setattr(ObjectStore, "put", put)


@pytest.mark.parametrize("has_nodes", [True, False])
def test_gc_makes_room_in_a_store_that_is_full(
    place: Place,
    shown: Any,
    rng: random.Random,
    full: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    has_nodes: bool,
) -> None:
    """Incident: it put a small object first, to know the time, and a full store took none."""
    names = place.fill(rng, 3, days=(9, 1, 0))
    newest_s = max(place.path(name).stat().st_mtime for name in names)
    if has_nodes:
        place.store.put(place.names.node(1), b"-")
        newest_s = time.time() - 86400  # of yesterday
        os.utime(place.folder / place.names.node(1), (newest_s, newest_s))
    full()
    status = main(["remote", "gc", *place.flags, "--json"])
    said = capsys.readouterr()
    assert status == Exit.OK
    assert json.loads(said.out)["objects"]["pages"] == 1
    assert "507" in said.err
    assert f"as of {day_of(newest_s)}" in said.err
    left = [item for item in place.files() if place.names.pages_of(item)]
    assert left == sorted(map(place.names.pages, names[1:]))


def test_gc_of_an_empty_store_that_takes_no_put_says_why(
    place: Place, full: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    full()
    assert main(["remote", "gc", *place.flags]) == Exit.NO_DAEMON
    assert "507" in capsys.readouterr().err


def test_check_counts_and_verifies_a_store_that_is_full(
    place: Place, shown: Any, rng: random.Random, full: Callable[[], None]
) -> None:
    place.fill(rng, 3)
    full()
    status, found = shown("check", *place.flags, "--json")
    assert status == Exit.FOUND
    assert "507" in found["calls"]["put"]
    assert (found["works"], found["objects"], found["verified"]["objects"]) == (False, 3, 3)
    status, text = shown("check", *place.flags)
    assert status == Exit.FOUND
    assert "507" in text
    assert "verified 3 of 3 objects" in text


# --- status


def test_status_of_a_daemon_without_a_remote_tier_says_so(tmp_path: Path, shown: Any) -> None:
    with Served(tmp_path) as served:
        where = ("--socket", str(served.config.socket))
        status, text = shown("status", *where)
        assert status == Exit.OK
        assert "--remote URL" in text
        status, found = shown("status", *where, "--json")
        assert status == Exit.OK
        assert not found["remote"].get("state")


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("init",), "--remote is missing"),
        (("check", "--remote", "file:///nowhere-at-all"), "--fleet-secret is missing"),
        (("check", "--objects", "-1"), "--objects -1"),
        (("gc", "--objects", "5"), "remote check"),
        (("check", "--dry-run"), "remote gc"),
        (("gc", "--socket", "/tmp/s"), "asks the store and no daemon"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_line(
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("KVW_CONFIG", "KVW_REMOTE", "KVW_FLEET_SECRET"):
        monkeypatch.delenv(name, raising=False)
    assert main(["remote", *arguments]) == Exit.USAGE
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert said in text


def test_folder_that_is_not_there_is_refused(place: Place, capsys: Any) -> None:
    place.folder.rmdir()
    assert main(["remote", "check", *place.flags]) == Exit.USAGE
    assert "no folder" in capsys.readouterr().err

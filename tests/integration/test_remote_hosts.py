"""Two real daemons of one fleet, with a folder as their store: what one has stored the other loads,
what one has cleared no other has, and what each says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.main import main
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse_bench.harness.eventually import eventually
from testkit.fleet_secrets import secret_file
from testkit.quick_remote import QuickServing
from testkit.remote_host import object_paths

NAMES = FleetNames(FleetSecret.derive(bytes(32)).fleet_id)
PAGE_TOKENS, PAGE_BYTES = 16, 4096
RUN_PAGES = 256 // PAGE_TOKENS  # one object
RECORD_BYTES = 4096 + PAGE_BYTES
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="f", layout="t/1", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES
)
LOAD_S = 60.0  # a load's or store's own time, on a machine that is busy


def tokens(prompt: int, runs: int = 1) -> list[int]:
    return list(range(10_000 * prompt, 10_000 * prompt + 256 * runs))


def pages(prompt: int, runs: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    shape = (RUN_PAGES * runs, PAGE_BYTES)
    return np.random.default_rng(prompt).integers(0, 255, shape, np.uint8)


class Host:
    def __init__(self, fleet: Path, name: str, **settings: Any) -> None:
        self.store_folder = fleet / "store"
        usual = {
            "remote": f"file://{self.store_folder}", "remote_capacity": "1GiB",
            "remote_write": "all", "fleet_secret": secret_file(fleet), "name": name,
        }  # fmt: skip
        self.serving = QuickServing(fleet / name, **{**usual, **settings})
        self.client: Any = None

    def start(self) -> None:
        self.serving.start()
        self.client = self.serving.connect(timeout_s=LOAD_S)

    def remove(self) -> None:
        if self.client is not None:
            self.client.close()
        self.serving.remove()

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.client.status())

    def until(self, so: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        def ask() -> dict[str, Any] | None:
            status = self.status
            return status if so(status) else None

        return eventually(ask, what)

    def store(self, prompt: int, runs: int = 1) -> None:
        """Until all of it is in the store too."""
        before = self.status["remote"]["puts"].get("stored", 0)
        space = self.client.open(SPACE)
        stored = space.store(tokens(prompt, runs), pages(prompt, runs), timeout_s=LOAD_S)
        assert stored.stored == RUN_PAGES * runs, stored

        def is_put(status: dict[str, Any]) -> bool:
            # Nothing is put before it is known what the fleet has cleared; a use offers it again.
            self.load(prompt, runs)
            return bool(status["remote"]["puts"].get("stored", 0) == before + runs)

        self.until(is_put, "it was put")

    def lookup(self, prompt: int, runs: int = 1) -> kvw.Match:
        match: kvw.Match = self.client.open(SPACE).lookup(tokens(prompt, runs))
        return match

    def until_found(self, prompt: int, runs: int = 1) -> None:
        """In the store alone, whole."""
        whole = RUN_PAGES * runs
        eventually(
            lambda: self.lookup(prompt, runs).by_tier["remote"] == whole, "the store's are hits"
        )

    def load(self, prompt: int, runs: int = 1) -> kvw.Loaded:
        """Whatever is loaded is right."""
        out = np.zeros((RUN_PAGES * runs, PAGE_BYTES), np.uint8)
        loaded: kvw.Loaded = self.client.open(SPACE).load(
            tokens(prompt, runs), out, timeout_s=LOAD_S
        )
        assert np.array_equal(out[:loaded], pages(prompt, runs)[:loaded])
        return loaded

    def objects(self) -> dict[PagesName, Path]:
        return object_paths(self.store_folder, NAMES)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    (tmp_path / "store").mkdir()
    made: list[Host] = []

    def start(name: str, **settings: Any) -> Host:
        made.append(Host(tmp_path, name, **settings))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.remove()


def test_what_one_host_has_stored_another_loads_and_both_say_so(
    host: Callable[..., Host], capsys: pytest.CaptureFixture[str]
) -> None:
    first = host("first")
    first.store(1, runs=3)
    second = host("second")  # it lists what is there
    second.until_found(1, runs=3)
    assert second.load(1, runs=3) == 3 * RUN_PAGES
    match = second.lookup(1, runs=3)
    assert (match.pages, match.by_tier["remote"]) == (3 * RUN_PAGES, 0)

    status = second.until(
        lambda status: status["remote"]["gets"].get("filled") == 3 and not status["problems"],
        "its worker reported, and has heard of clears lately",
    )
    assert status["remote"]["read"] == "on"
    assert status["remote"]["get_bytes"] == 3 * RUN_PAGES * RECORD_BYTES
    assert status["remote"]["damaged"] == {}
    assert status["remote"]["epochs_owed"] == 0
    assert status["remote"]["epochs_ago_s"] >= 0

    def all_is_counted(status: dict[str, Any]) -> bool:
        core = status["core"]
        fetches = core["remote_fetches"]
        return bool(
            core["loads"]["pages_from_remote"] == 3 * RUN_PAGES
            and core["lookups"]["pages_hit_remote"] >= 3 * RUN_PAGES
            and fetches["ends"]["filled"] == 3
            and fetches["queued"] == fetches["under_way"] == 0
        )

    second.until(all_is_counted, "its client's counters were read, and the runs have ended")

    metrics = second.serving.metrics()
    assert metrics['kvwarehouse_remote_gets_total{result="filled"}'] == 3
    assert metrics['kvwarehouse_remote_fetches_total{end="filled"}'] == 3
    assert metrics["kvwarehouse_loaded_remote_pages_total"] == 3 * RUN_PAGES
    capsys.readouterr()
    assert main(["remote", "status", "--address", second.serving.address]) == 0
    rows = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert any(row.startswith("runs read filled 3; ") for row in rows), rows


def test_host_that_does_not_read_has_no_hits_in_the_store(host: Callable[..., Host]) -> None:
    host("first").store(1)
    second = host("second", remote_read="off")
    second.until(lambda status: status["remote"]["objects"] == 1, "it has listed the object")
    assert second.lookup(1).pages == 0
    assert second.load(1) == 0
    assert second.status["remote"]["read"] == "off"


def test_damaged_object_is_a_miss_from_that_page_on_and_is_counted(
    host: Callable[..., Host],
) -> None:
    first = host("first")
    first.store(1)
    ((_, path),) = first.objects().items()
    data = bytearray(path.read_bytes())
    data[5 * RECORD_BYTES + 4096 + 7] ^= 1  # of the sixth page's payload
    path.write_bytes(data)
    second = host("second")
    second.until_found(1)
    loaded = second.load(1)
    assert (loaded, set(loaded.missed)) == (5, {"remote_damaged"})
    status = second.until(lambda status: status["remote"]["gets"], "its worker reported")
    assert status["remote"]["gets"] == {"damaged": 1}
    assert status["remote"]["damaged"] == {"digest": 1}
    assert second.lookup(1).pages == 5  # nobody hopes for it again


def test_object_that_is_gone_ends_the_load_there(host: Callable[..., Host]) -> None:
    first = host("first")
    first.store(1)
    second = host("second")
    second.until_found(1)
    for path in first.objects().values():
        path.unlink()
    loaded = second.load(1)
    assert (loaded, set(loaded.missed)) == (0, {"remote_missing"})
    assert second.lookup(1).pages == 0
    status = second.until(lambda status: status["remote"]["gets"], "its worker reported")
    assert status["remote"]["gets"] == {"missing": 1}


def test_clear_of_one_host_reaches_all_and_what_is_stored_afterwards_is_found(
    host: Callable[..., Host], capsys: pytest.CaptureFixture[str]
) -> None:
    first = host("first")
    first.store(1)
    first.store(2)
    second = host("second")
    second.until_found(1)
    second.until_found(2)
    assert second.load(1) == RUN_PAGES
    capsys.readouterr()
    address = first.serving.address

    def is_done() -> bool:
        status = main(["clear", "--all", "--yes", "--json", "--address", address])
        is_done = '"remote": "done"' in capsys.readouterr().out
        assert status == (Exit.OK if is_done else Exit.FOUND)
        return is_done

    eventually(is_done, "the store has a clear")
    assert first.lookup(1).pages == first.lookup(2).pages == 0
    eventually(lambda: second.lookup(1).pages == 0, "what it had of it here is gone")
    eventually(lambda: second.lookup(2).pages == 0, "and it hopes for no older object")
    assert {name.epoch for name in first.objects()} == {0}

    first.store(3)
    assert len({name.epoch for name in first.objects()}) == 2
    third = host("third")
    third.until_found(3)
    assert third.load(3) == RUN_PAGES
    assert third.lookup(1).pages == third.lookup(2).pages == 0

"""A connection kept up behind an engine's back: real daemons come, go, stop and forget."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.harness.until import DEADLINE_S, until
from kvwarehouse_connectors.core.upkeep import Upkeep, UpkeepOptions

QUICK = UpkeepOptions(tick_s=0.01)
PAGE = 4096
_T = TypeVar("_T")


def space(name: str = "m", page_bytes: int = PAGE) -> kvw.Namespace:
    return kvw.Namespace(
        model=name,
        weights="w",
        dtype="uint8",
        layout="t/1",
        page_tokens=1,
        page_bytes=page_bytes,
        hash_scheme="random",
    )


SPACE = space()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="32MiB", nvme_capacity="64MiB") as serving:
        yield serving


@pytest.fixture
def made() -> Iterator[Callable[..., Upkeep]]:
    every: list[Upkeep] = []

    def make(address: str, options: UpkeepOptions = QUICK) -> Upkeep:
        every.append(Upkeep(address, options))
        return every[-1]

    yield make
    for upkeep in every:
        upkeep.close()


@pytest.fixture
def upkeep(serving: Serving, made: Callable[..., Upkeep]) -> Upkeep:
    return made(serving.address)


def opened(upkeep: Upkeep, wanted: kvw.Namespace = SPACE) -> kvw.OpenNamespace:
    return until(lambda: upkeep.opened(wanted), "the namespace is opened")


def page() -> tuple[list[kvw.KeyRun], np.ndarray]:
    content = np.frombuffer(os.urandom(PAGE), np.uint8).reshape(1, PAGE)
    return [kvw.KeyRun([os.urandom(32)])], content


def stores(upkeep: Upkeep, wanted: kvw.Namespace = SPACE) -> bool:
    """A page that is stored by what is opened now, as an outbox does it, comes back."""
    space = upkeep.opened(wanted)
    if space is None or upkeep.control() is None:
        return False
    keys, content = page()
    try:
        stored = space.store(keys=keys, pages=content, timeout_s=DEADLINE_S).stored
    except kvw.WarehouseError as error:
        upkeep.doubt(wanted, error)
        return False
    back = np.zeros_like(content)
    return stored == 1 and space.load(keys=keys, out=back) == 1 and np.array_equal(back, content)


def beside(call: Callable[[], _T]) -> _T:
    """The answer of a call in a thread of its own; fails when it does not end."""
    answers: list[_T] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert answers, "it does not end"
    return answers[0]


def test_absent_daemon_is_no_error_and_nobody_waits_for_it(
    tmp_path: Path, made: Callable[..., Upkeep]
) -> None:
    upkeep = made(f"unix://{tmp_path / 'kvw.sock'}")
    assert upkeep.client is None
    assert upkeep.control() is None
    assert upkeep.opened(SPACE) is None
    assert beside(lambda: upkeep.wait_opened(SPACE, 10 * DEADLINE_S)) is None
    assert "kvw.sock" in upkeep.problem


@pytest.mark.parametrize("address", ["", "unix://relative.sock", "no address", "gpu-7:7070"])
def test_bad_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(kvw.UsageError):
        Upkeep(address, QUICK)


def test_daemon_that_comes_later_is_found_and_gets_what_was_wanted(
    tmp_path: Path, made: Callable[..., Upkeep], caplog: pytest.LogCaptureFixture
) -> None:
    serving = Serving(tmp_path, dram="32MiB")
    try:
        upkeep = made(serving.address)
        assert upkeep.opened(SPACE) is None
        serving.start()
        until(lambda: stores(upkeep), "pages are stored")
        # It registers what is wanted, and then says that all is well.
        until(lambda: upkeep.problem == "", "the problem is over")
        assert "serves again" in caplog.text
    finally:
        serving.remove()


def test_daemon_that_is_there_serves_from_the_start(upkeep: Upkeep) -> None:
    assert upkeep.problem == ""
    assert upkeep.wait_opened(SPACE, DEADLINE_S) is not None
    assert upkeep.control() is not None
    until(lambda: stores(upkeep), "pages are stored")


def test_each_namespace_is_opened_on_its_own(upkeep: Upkeep) -> None:
    assert opened(upkeep).space == SPACE
    other = space("other")
    assert upkeep.opened(other) is None
    assert opened(upkeep, other).space == other


def test_restarted_daemon_is_found_and_what_was_stored_is_there(
    serving: Serving, upkeep: Upkeep
) -> None:
    keys, content = page()
    opened(upkeep).store(keys=keys, pages=content)
    serving.kill()
    until(lambda: upkeep.problem and upkeep.control() is None, "its end is seen")
    serving.start()
    until(lambda: stores(upkeep), "pages are stored again")
    assert opened(upkeep).tiers(keys=keys).all()


def test_daemon_that_lost_everything_is_told_the_namespaces_anew(
    serving: Serving, upkeep: Upkeep
) -> None:
    until(lambda: stores(upkeep), "pages are stored")
    serving.kill()
    shutil.rmtree(serving.arena_dir)
    shutil.rmtree(serving.nvme_dir)
    serving.start()
    until(lambda: stores(upkeep), "pages are stored again")


def test_scheduler_that_only_reads_registers_what_it_reads_too(
    serving: Serving, made: Callable[..., Upkeep]
) -> None:
    reader = made(serving.address, UpkeepOptions(read_only=True, tick_s=0.01))
    assert not opened(reader).tiers(keys=page()[0]).any()
    with pytest.raises(kvw.UsageError):
        opened(reader).store(keys=page()[0], pages=page()[1])


def test_stopped_daemon_counts_as_none_and_holds_nobody(serving: Serving, upkeep: Upkeep) -> None:
    keys, content = page()
    opened(upkeep).store(keys=keys, pages=content)
    serving.pause()
    try:
        until(lambda: upkeep.control() is None, "its silence is noticed")
        assert beside(lambda: upkeep.opened(space("another"))) is None
        assert beside(lambda: opened(upkeep).tiers(keys=keys)).all()
        assert beside(lambda: upkeep.wait_opened(space("another"), 0.05)) is None
    finally:
        serving.resume()
    until(lambda: upkeep.control() is not None, "it is alive again")
    until(lambda: stores(upkeep), "pages are stored again")
    assert opened(upkeep, space("another"))


def test_daemon_is_not_stopped_for_being_late_where_this_process_is_late_too(
    serving: Serving, made: Callable[..., Upkeep]
) -> None:
    """A looker that had no turn yet has not seen the silence, however long it is."""
    upkeep = made(serving.address, UpkeepOptions(tick_s=10 * DEADLINE_S))
    assert upkeep.client is not None
    client = upkeep.client
    serving.pause()
    try:
        until(lambda: client.control().heartbeat_age_s > 1.5, "its heartbeat is late")
        assert upkeep.control() is not None
    finally:
        serving.resume()


def test_close_does_not_wait_for_a_stopped_daemon(
    serving: Serving, made: Callable[..., Upkeep]
) -> None:
    upkeep = made(serving.address)
    opened(upkeep)
    serving.pause()
    try:
        upkeep.opened(space("another"))
        beside(lambda: [upkeep.close()])
    finally:
        serving.resume()
    assert upkeep.client is None


def test_namespace_that_is_refused_is_said_once_and_not_asked_for_again(
    upkeep: Upkeep, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pages fit no slab: only another daemon could hold them."""
    large = space("large", page_bytes=1 << 30)
    with pytest.raises(kvw.UsageError):
        upkeep.wait_opened(large, DEADLINE_S)
    for _ in range(20):
        assert upkeep.opened(large) is None
        with pytest.raises(kvw.UsageError):
            upkeep.wait_opened(large, DEADLINE_S)
    assert caplog.text.count("refuses") == 1
    assert opened(upkeep).space == SPACE


def test_namespace_that_was_refused_is_opened_by_a_daemon_with_room_for_its_pages(
    tmp_path: Path, made: Callable[..., Upkeep]
) -> None:
    large = space("large", page_bytes=16 << 20)
    with Serving(tmp_path, dram="32MiB") as serving:
        upkeep = made(serving.address)
        with pytest.raises(kvw.UsageError):
            upkeep.wait_opened(large, DEADLINE_S)
        serving.kill()
        shutil.rmtree(serving.arena_dir)  # its slabs keep their size
        serving.settings["dram"] = "1GiB"
        serving.start()
        until(lambda: upkeep.opened(large), "the namespace at the new daemon")


def test_doubt_about_something_else_changes_nothing(upkeep: Upkeep) -> None:
    before = opened(upkeep)
    for error in (
        kvw.TransportError("gone", code="no_daemon"),
        kvw.UsageError("bad", code="bad_pages"),
        RuntimeError("odd"),
    ):
        upkeep.doubt(SPACE, error)
        assert upkeep.opened(SPACE) is before


def test_many_threads_may_ask_at_once(upkeep: Upkeep) -> None:
    spaces = [space(f"m{number}") for number in range(8)]
    barrier = threading.Barrier(16)
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            barrier.wait(DEADLINE_S)
            for one in spaces[number % 3 :]:
                found = upkeep.wait_opened(one, DEADLINE_S)
                assert found is not None
                assert found.space == one
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert failures == []

"""A connection kept up behind an engine's back: real daemons come, go, stop and forget."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core import daemon_connection
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection

QUICK = ConnectionOptions(tick_s=0.01)
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
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that has no turn on the processor for 2 s is not one that is gone."""
    monkeypatch.setattr(daemon_connection, "_CALL_TIMEOUT_S", DEADLINE_S)


@pytest.fixture
def made() -> Iterator[Callable[..., DaemonConnection]]:
    every: list[DaemonConnection] = []

    def make(address: str, options: ConnectionOptions = QUICK) -> DaemonConnection:
        every.append(DaemonConnection(address, options))
        return every[-1]

    yield make
    for connection in every:
        connection.close()


@pytest.fixture
def connection(serving: Serving, made: Callable[..., DaemonConnection]) -> DaemonConnection:
    return made(serving.address)


def opened(connection: DaemonConnection, wanted: kvw.Namespace = SPACE) -> kvw.OpenNamespace:
    return eventually(lambda: connection.namespace(wanted), "the namespace is opened")


def page() -> tuple[list[kvw.KeyRun], np.ndarray]:
    content = np.frombuffer(os.urandom(PAGE), np.uint8).reshape(1, PAGE)
    return [kvw.KeyRun([os.urandom(32)])], content


def stores(connection: DaemonConnection, wanted: kvw.Namespace = SPACE) -> bool:
    """A page that is stored by what is opened now, as a store queue does it, comes back."""
    space = connection.namespace(wanted)
    if space is None or connection.control() is None:
        return False
    keys, content = page()
    try:
        stored = space.store(keys=keys, pages=content, timeout_s=DEADLINE_S).stored
    except kvw.WarehouseError as error:
        connection.call_failed(wanted, error)
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
    tmp_path: Path, made: Callable[..., DaemonConnection]
) -> None:
    connection = made(f"unix://{tmp_path / 'kvw.sock'}")
    assert connection.client is None
    assert connection.control() is None
    assert connection.namespace(SPACE) is None
    assert beside(lambda: connection.wait_namespace(SPACE, 10 * DEADLINE_S)) is None
    assert "kvw.sock" in connection.problem


@pytest.mark.parametrize("address", ["", "unix://relative.sock", "no address", "gpu-7:7070"])
def test_bad_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(kvw.UsageError):
        DaemonConnection(address, QUICK)


def test_daemon_that_comes_later_is_found_and_gets_what_was_wanted(
    tmp_path: Path, made: Callable[..., DaemonConnection], caplog: pytest.LogCaptureFixture
) -> None:
    serving = Serving(tmp_path, dram="32MiB")
    try:
        connection = made(serving.address)
        assert connection.namespace(SPACE) is None
        serving.start()
        eventually(lambda: stores(connection), "pages are stored")
        # It registers what is wanted, and then says that all is well.
        eventually(lambda: connection.problem == "", "the problem is over")
        assert "serves again" in caplog.text
    finally:
        serving.remove()


@pytest.mark.usefixtures("patient")
def test_daemon_that_is_there_serves_from_the_start(connection: DaemonConnection) -> None:
    assert connection.problem == ""
    assert connection.wait_namespace(SPACE, DEADLINE_S) is not None
    # Looks that come often see one stand still that only waits for the processor.
    eventually(lambda: connection.control() is not None, "it is alive")
    eventually(lambda: stores(connection), "pages are stored")


def test_each_namespace_is_opened_on_its_own(connection: DaemonConnection) -> None:
    assert opened(connection).space == SPACE
    other = space("other")
    assert connection.namespace(other) is None
    assert opened(connection, other).space == other


def test_restarted_daemon_is_found_and_what_was_stored_is_there(
    serving: Serving, connection: DaemonConnection
) -> None:
    keys, content = page()
    opened(connection).store(keys=keys, pages=content)
    serving.kill()
    eventually(lambda: connection.problem and connection.control() is None, "its end is seen")
    serving.start()
    eventually(lambda: stores(connection), "pages are stored again")
    assert opened(connection).tiers(keys=keys).all()


def test_daemon_that_lost_everything_is_told_the_namespaces_anew(
    serving: Serving, connection: DaemonConnection
) -> None:
    eventually(lambda: stores(connection), "pages are stored")
    serving.kill()
    shutil.rmtree(serving.arena_dir)
    shutil.rmtree(serving.nvme_dir)
    serving.start()
    eventually(lambda: stores(connection), "pages are stored again")


def test_scheduler_that_only_reads_registers_what_it_reads_too(
    serving: Serving, made: Callable[..., DaemonConnection]
) -> None:
    reader = made(serving.address, ConnectionOptions(read_only=True, tick_s=0.01))
    assert not opened(reader).tiers(keys=page()[0]).any()
    with pytest.raises(kvw.UsageError):
        opened(reader).store(keys=page()[0], pages=page()[1])


def test_stopped_daemon_counts_as_none_and_holds_nobody(
    serving: Serving, connection: DaemonConnection
) -> None:
    keys, content = page()
    opened(connection).store(keys=keys, pages=content)
    serving.pause()
    try:
        eventually(lambda: connection.control() is None, "its silence is noticed")
        assert beside(lambda: connection.namespace(space("another"))) is None
        assert beside(lambda: opened(connection).tiers(keys=keys)).all()
        assert beside(lambda: connection.wait_namespace(space("another"), 0.05)) is None
    finally:
        serving.resume()
    eventually(lambda: connection.control() is not None, "it is alive again")
    eventually(lambda: stores(connection), "pages are stored again")
    assert opened(connection, space("another"))


def test_daemon_is_not_stopped_for_being_late_where_this_process_is_late_too(
    serving: Serving, made: Callable[..., DaemonConnection]
) -> None:
    """A looker that had no turn yet has not seen the silence, however long it is."""
    connection = made(serving.address, ConnectionOptions(tick_s=10 * DEADLINE_S))
    assert connection.client is not None
    client = connection.client
    serving.pause()
    try:
        eventually(lambda: client.control().heartbeat_age_s > 1.5, "its heartbeat is late")
        assert connection.control() is not None
    finally:
        serving.resume()


def test_close_does_not_wait_for_a_stopped_daemon(
    serving: Serving, made: Callable[..., DaemonConnection]
) -> None:
    connection = made(serving.address)
    opened(connection)
    serving.pause()
    try:
        connection.namespace(space("another"))
        beside(lambda: [connection.close()])
    finally:
        serving.resume()
    assert connection.client is None


@pytest.mark.usefixtures("patient")
def test_namespace_that_is_refused_is_said_once_and_not_asked_for_again(
    connection: DaemonConnection, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pages fit no slab: only another daemon could hold them."""
    large = space("large", page_bytes=1 << 30)
    with pytest.raises(kvw.UsageError):
        connection.wait_namespace(large, DEADLINE_S)
    for _ in range(20):
        assert connection.namespace(large) is None
        with pytest.raises(kvw.UsageError):
            connection.wait_namespace(large, DEADLINE_S)
    assert caplog.text.count("refuses") == 1
    assert opened(connection).space == SPACE


@pytest.mark.usefixtures("patient")
def test_refusal_keeps_nothing_of_who_asked(connection: DaemonConnection) -> None:
    """The error was kept with the frames that it was raised through, and so were the copies of
    blocks that every refused store had made."""

    class Blocks:
        pass

    def store() -> weakref.ref[Blocks]:
        blocks = Blocks()
        with pytest.raises(kvw.UsageError):
            connection.wait_namespace(space("large", page_bytes=1 << 30), DEADLINE_S)
        return weakref.ref(blocks)

    kept = [store() for _ in range(3)]
    gc.collect()
    assert [blocks() for blocks in kept] == [None] * 3


@pytest.mark.usefixtures("patient")
def test_namespace_that_was_refused_is_opened_by_a_daemon_with_room_for_its_pages(
    tmp_path: Path, made: Callable[..., DaemonConnection]
) -> None:
    large = space("large", page_bytes=16 << 20)
    with Serving(tmp_path, dram="32MiB") as serving:
        connection = made(serving.address)
        with pytest.raises(kvw.UsageError):
            connection.wait_namespace(large, DEADLINE_S)
        serving.kill()
        shutil.rmtree(serving.arena_dir)  # its slabs keep their size
        serving.settings["dram"] = "1GiB"
        serving.start()
        eventually(lambda: connection.namespace(large), "the namespace at the new daemon")


def test_call_that_failed_for_another_reason_changes_nothing(connection: DaemonConnection) -> None:
    before = opened(connection)
    for error in (
        kvw.TransportError("gone", code="no_daemon"),
        kvw.UsageError("bad", code="bad_pages"),
        RuntimeError("odd"),
    ):
        connection.call_failed(SPACE, error)
        assert connection.namespace(SPACE) is before


@pytest.mark.usefixtures("patient")
def test_many_threads_may_ask_at_once(connection: DaemonConnection) -> None:
    spaces = [space(f"m{number}") for number in range(8)]
    barrier = threading.Barrier(16)
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            barrier.wait(DEADLINE_S)
            for one in spaces[number % 3 :]:
                found = connection.wait_namespace(one, DEADLINE_S)
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


def test_notes_reach_the_daemon_behind_the_engine_and_the_oldest_give_way(
    serving: Serving, made: Callable[..., DaemonConnection], patient: None
) -> None:
    most = daemon_connection._MOST_NOTES
    connection = made(serving.address)
    eventually(lambda: not connection.problem, "a daemon is found")
    serving.stop()
    eventually(lambda: connection.problem, "it is gone")
    for number in range(most + 7):
        connection.note(kvw.RequestNote(str(number), 8, 0, 0, 0))
    serving.start()
    with serving.connect() as client:
        eventually(lambda: client.requests(str(most + 6)), "the newest is told")
        assert client.requests("7")[0].note.request_id == "7"
        assert not [each for each in client.requests("6") if each.note.request_id == "6"]


def test_note_that_is_refused_costs_nothing_else(
    serving: Serving, made: Callable[..., DaemonConnection]
) -> None:
    connection = made(serving.address, ConnectionOptions(tick_s=0.01, engine="e"))
    connection.note(kvw.RequestNote("", 8, 0, 0, 0))
    with serving.connect() as client:
        eventually(lambda: not connection._notes, "it was sent")
        long = "\N{GREEK SMALL LETTER ALPHA}" * 200  # of which 256 bytes are told
        connection.note(kvw.RequestNote(long, 8, 0, 0, 0))
        eventually(lambda: client.requests(long[:100]), "the next one is told")
        (noted,) = client.requests()
    assert (noted.note.request_id, noted.note.engine) == (long[:128], f"e-{os.getpid()}")
    assert connection.problem == ""

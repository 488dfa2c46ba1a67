"""Somebody removes a daemon's files or sockets: it says so, and new clients get in again."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.process import free_port
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit.known_prompt import KnownPrompt
from testkit.kv_subscriber import KvSubscriber
from testkit.remote_host import TakenFolder

BEFORE, AFTER = (KnownPrompt(model, pages=12, page_bytes=20_000) for model in ("before", "after"))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="16MiB") as serving:
        yield serving


def readiness(serving: Serving, path: str = "/readyz") -> tuple[int, str]:
    address = serving.events("ready")[0]["http"]
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def remove(folder: Path) -> None:
    """At one blow: a daemon that looks meanwhile would put parts of it back, and miss the rest
    later, by itself."""
    aside = folder.with_name(f"{folder.name}.aside")
    folder.rename(aside)
    shutil.rmtree(aside)


def replace(socket: Path, kind: str) -> None:
    """By somebody else's. Not by removing it first: the daemon may put it back in between."""
    other = socket.with_name("other")
    if kind == "file":
        other.write_text("of somebody else")
        other.rename(socket)
        return
    other.mkdir()

    def is_there() -> bool:
        socket.unlink(missing_ok=True)  # a folder takes the place of no socket
        try:
            other.rename(socket)
        except NotADirectoryError:
            return False
        return True

    eventually(is_there, "the folder is there")


def work_of_a_new_client(serving: Serving, prompt: KnownPrompt) -> bool:
    """Whether one gets in; then everything has to work."""
    try:
        client = serving.connect(timeout_s=60)
    except kvw.WarehouseError:
        return False
    with client:
        try:
            client.open(prompt.space)
        except kvw.TransportError:
            return False  # the other socket is not there yet
        prompt.store(client)
        assert prompt.load(client) == prompt.pages
        return True


def test_new_clients_get_in_after_the_arena_directory_was_removed(serving: Serving) -> None:
    """Incident: after a cleaner of /dev/shm each new client got ENOENT for ever, and every light of
    the daemon was green."""
    with serving.connect() as client:
        BEFORE.store_whole(client)
        remove(serving.arena_dir)
        eventually(lambda: work_of_a_new_client(serving, AFTER), "a new client gets in")
        assert BEFORE.load(client) == BEFORE.pages
        eventually(lambda: serving.events("path_removed"), "what is lost is said")
        status = client.status()
    reason = status["service"]["paths_reason"]
    assert [(each["what"], each["reason"]) for each in status["problems"]] == [
        ("files removed", reason)
    ]
    assert str(serving.arena_dir / "slots") in reason
    assert "pages in DRAM" in reason
    assert [event["level"] for event in serving.events("path_removed")] == ["error"]
    assert [event["level"] for event in serving.events("path_restored")] == ["warning"]
    assert serving.metrics()["kvwarehouse_paths_lost"] == 1
    assert readiness(serving)[0] == 200
    assert serving.stop() == 0
    serving.start()
    assert work_of_a_new_client(serving, AFTER)
    with serving.connect() as client:
        assert client.status()["service"]["paths_reason"] == ""


def test_sockets_that_were_removed_are_bound_again(serving: Serving) -> None:
    sockets = [Path(serving.socket), Path(serving.socket + ".grpc")]
    with serving.connect(timeout_s=60) as client:
        BEFORE.store_whole(client)
        for times in (1, 2):
            # The lock first: it is made anew with a socket alone.
            for path in (Path(serving.socket + ".lock"), *sockets):
                path.unlink()
            eventually(lambda: all(path.exists() for path in sockets), "both are there again")
            eventually(lambda: work_of_a_new_client(serving, AFTER), "a new client gets in")
            assert BEFORE.load(client) == BEFORE.pages
            assert client.status()["service"]["paths_reason"] == ""
            due = 2 * times  # said behind the work: a client may come in before
            eventually(lambda due=due: len(serving.events("path_restored")) == due, "both are said")
    with (
        pytest.raises(RefusedError, match="in use by another daemon"),
        Serving(serving.arena_dir, socket=serving.socket, http="off"),
    ):
        pass
    assert serving.stop() == 0
    assert not any(path.exists() for path in sockets)


def test_socket_that_cannot_be_bound_again_is_said_until_it_can(serving: Serving) -> None:
    socket = Path(serving.socket)
    replace(socket, "file")
    eventually(lambda: readiness(serving)[0] == 503, "readiness says so")
    assert str(socket) in readiness(serving)[1]
    assert serving.metrics()["kvwarehouse_paths_lost"] == 1
    socket.unlink()
    eventually(lambda: readiness(serving)[0] == 200, "it is bound again")
    assert work_of_a_new_client(serving, AFTER)
    assert [event["level"] for event in serving.events("path_not_restored")] == ["error"]
    assert serving.metrics()["kvwarehouse_paths_lost"] == 0


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_has_the_name_of_a_removed_socket_is_left_to_its_owner_at_the_end(
    serving: Serving, kind: str
) -> None:
    """Incident: the daemon could not remove what another user had put there, and ended with 1 as if
    it had failed."""
    path = Path(serving.socket + ".grpc")
    replace(path, kind)
    eventually(lambda: serving.events("path_not_restored"), "it is seen")
    assert serving.stop() == 0
    assert path.exists()


@pytest.mark.parametrize("name", ["arena", "slots", "index.*", "control"])
def test_file_of_the_arena_that_was_removed_is_said(serving: Serving, name: str) -> None:
    """Incident: nothing was said of the index, which has a number in its name."""
    [path] = serving.arena_dir.glob(name)
    path.unlink()
    eventually(lambda: serving.events("path_removed"), "what is lost is said")
    with serving.connect_remote() as client:
        assert str(path) in client.status()["service"]["paths_reason"]


def test_arena_directory_that_cannot_be_put_back_is_not_ready_until_it_can(
    serving: Serving,
) -> None:
    """It stays live: clients that are there are served, and a restart would not find the pages."""
    with serving.connect() as client:
        BEFORE.store_whole(client)
        TakenFolder(serving.arena_dir).take()
        eventually(lambda: readiness(serving)[0] == 503, "readiness says so")
        assert str(serving.arena_dir) in readiness(serving)[1]
        assert readiness(serving, "/healthz")[0] == 200
        assert BEFORE.load(client) == BEFORE.pages
        serving.arena_dir.unlink()
        eventually(lambda: readiness(serving)[0] == 200, "new clients get in")
        assert work_of_a_new_client(serving, AFTER)
        assert BEFORE.load(client) == BEFORE.pages
    assert readiness(serving, "/healthz")[0] == 200
    assert serving.metrics()["kvwarehouse_paths_lost"] == 1, "DRAM's pages end with this daemon"


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_sockets_of_kv_events_that_were_removed_are_bound_again(
    tmp_path: Path, transport: str
) -> None:
    """Incident: each new subscriber was accepted and cut, for ever, and every light was green."""
    if transport == "tcp":  # behind it are sockets of the daemon's own
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    else:
        endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    with (
        Serving(
            tmp_path, dram="16MiB", kv_events=endpoints[0], kv_events_replay=endpoints[1]
        ) as serving,
        serving.connect() as client,
    ):
        names = (serving.socket + ".kve", serving.socket + ".kvr")
        if transport == "ipc":
            names = tuple(each.removeprefix("ipc://") for each in endpoints)
        paths = [Path(name) for name in names]
        BEFORE.store_whole(client)
        for times in (1, 2):
            for path in paths:
                path.unlink()
            due = 2 * times
            eventually(lambda due=due: len(serving.events("path_restored")) == due, "both are said")
            assert all(path.is_socket() for path in paths)
            with KvSubscriber(*endpoints) as subscriber:
                eventually(partial(hears_all, subscriber), "a new subscriber hears all")
                assert not subscriber.problems
            assert client.status()["service"]["paths_reason"] == ""


def hears_all(subscriber: KvSubscriber) -> bool:
    """Of what was stored before."""
    subscriber.read()
    return len(subscriber.blocks) == BEFORE.pages


def test_socket_of_kv_events_that_cannot_be_bound_again_is_said_until_it_can(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    endpoint = f"ipc://{folder}/e"
    with (
        Serving(tmp_path / "disk", dram="16MiB", kv_events=endpoint) as serving,
        serving.connect() as client,
    ):

        def reason() -> str:
            return str(client.status()["service"]["paths_reason"])

        remove(folder)
        eventually(lambda: "no new subscriber gets in" in reason(), "the status says so")
        assert str(folder) in reason()
        assert [event["level"] for event in serving.events("path_not_restored")] == ["error"]
        assert readiness(serving)[0] == 200  # clients get in
        folder.mkdir()
        eventually(lambda: not reason(), "it is there again")
        assert (folder / "e").is_socket()

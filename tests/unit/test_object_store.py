"""The store of objects under the remote tier: over obstore's memory and a folder, and over HTTP to
a server that fails on purpose. Nothing here leaves this machine."""

from __future__ import annotations

import contextlib
import gc
import http.server
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.remote import breaker as breaker_rules
from kvwarehouse.remote.breaker import Breaker
from kvwarehouse.remote.object_store import ObjectStore, StoreSettings, _options, open_store
from kvwarehouse_bench.harness.process import free_port
from testkit.mounts import NoMountsError, mount_tmpfs, own_mounts

SECRET = "not-for-anybodys-log"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class BadServer:
    """Says to every request what it is told to say, and counts them."""

    def __init__(self) -> None:
        self.status, self.body, self.length, self.delay = 200, b"", None, threading.Event()
        self.waits, self.asked = False, threading.Event()
        self.requests: list[str] = []
        bad = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                bad.requests.append(f"{self.command} {self.path}")
                bad.asked.set()
                self.rfile.read(int(self.headers.get("content-length", 0)))
                if bad.waits:
                    bad.delay.wait(30)
                self.send_response(bad.status)
                length = len(bad.body) if bad.length is None else bad.length
                self.send_header("content-length", str(length))
                self.send_header("content-range", f"bytes 0-{max(length, 1) - 1}/{max(length, 1)}")
                self.send_header("last-modified", "Sat, 28 Nov 2026 03:00:00 GMT")
                self.send_header("etag", '"1"')
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(bad.body)

            def log_message(self, *unused: Any) -> None:
                """Says nothing."""

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *unused: Any) -> None:
                """Says nothing of those who gave up before the answer came."""

        for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            setattr(Handler, f"do_{method}", Handler.answer)
        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.delay.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[BadServer]:
    made = BadServer()
    yield made
    made.close()


@pytest.fixture
def over_http(server: BadServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ObjectStore]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def made(get_s: float = 60.0) -> ObjectStore:
        settings = StoreSettings(
            "s3://bucket/kv",
            endpoint=server.url,
            region="us-east-1",
            connect_s=60.0,
            get_s=get_s,
            put_s=60.0,
        )
        return open_store(settings)

    return made


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    url = "memory:///" if request.param == "memory" else f"file://{tmp_path}"
    return open_store(StoreSettings(url))


def test_object_comes_back_as_it_went_whole_and_in_ranges(store: ObjectStore) -> None:
    data = bytes(range(256)) * 40
    assert store.put("v1/a/b", memoryview(data))
    whole = store.get("v1/a/b", 0, len(data))
    assert whole is not None
    assert bytes(whole) == data
    part = store.get("v1/a/b", 1000, 2000)
    assert part is not None
    assert bytes(part) == data[1000:2000]


def test_object_that_is_not_there_is_a_miss_and_no_failure(store: ObjectStore) -> None:
    for _ in range(2 * breaker_rules.FAILURES):
        assert store.get("v1/none", 0, 10) is None
    assert not store.failing()


def test_object_that_is_shorter_than_its_range_gives_what_there_is(store: ObjectStore) -> None:
    store.put("a", b"0123456789")
    found = store.get("a", 5, 100)
    assert found is not None
    assert bytes(found) == b"56789"


def test_object_that_ends_before_its_range_gives_nothing_and_is_no_failure(tmp_path: Path) -> None:
    store = open_store(StoreSettings(f"file://{tmp_path}"))
    store.put("a", b"0123456789")
    for _ in range(2 * breaker_rules.FAILURES):
        assert store.get("a", 10, 20) == b""
    assert not store.failing()


def test_put_if_absent_leaves_the_first_object(store: ObjectStore) -> None:
    assert store.put("a", b"first", if_absent=True)
    assert not store.put("a", b"second", if_absent=True)
    assert store.get("a", 0, 10) == b"first"
    assert store.put("a", b"third")
    assert store.get("a", 0, 10) == b"third"
    assert not store.failing()


def test_copy_is_another_object_of_the_same_bytes(store: ObjectStore) -> None:
    store.put("v1/1/a", b"bytes")
    assert store.copy("v1/1/a", "v1/2/a")
    store.delete(["v1/1/a"])
    assert store.get("v1/2/a", 0, 10) == b"bytes"


def test_copy_of_an_object_that_is_not_there_is_a_miss_and_no_failure(store: ObjectStore) -> None:
    for _ in range(2 * breaker_rules.FAILURES):
        assert not store.copy("v1/none", "v1/to")
    assert not store.failing()
    assert list(store.list("v1/")) == []


def test_copy_in_a_folder_is_as_new_as_what_is_put_and_leaves_nothing_else(tmp_path: Path) -> None:
    """Incident: two hosts that copied the same object at a time left a second link of it, which is
    in no listing and was deleted by nobody."""
    store = open_store(StoreSettings(f"file://{tmp_path}"))
    store.put("v1/1/a", b"bytes")
    os.utime(tmp_path / "v1/1/a", (1e9, 1e9))
    for _ in range(2):
        assert store.copy("v1/1/a", "v1/2/a")
    store.put("v1/2/b", b"1")
    times = {path.name: path.stat().st_mtime for path in (tmp_path / "v1/2").iterdir()}
    assert set(times) == {"a", "b"}
    assert abs(times["a"] - times["b"]) < 60
    assert not store.copy("v1/none", "v1/3/a")
    assert not (tmp_path / "v1/3").exists()


def test_copy_in_a_folder_replaces_what_is_there(tmp_path: Path) -> None:
    store = open_store(StoreSettings(f"file://{tmp_path}"))
    store.put("v1/1/a", b"first")
    store.put("v1/2/a", b"second")
    assert store.copy("v1/1/a", "v1/2/a")
    store.put("v1/1/a", b"third")
    assert store.get("v1/2/a", 0, 10) == b"first"


def test_listing_has_all_below_a_prefix_and_behind_a_name(store: ObjectStore) -> None:
    for number in range(120):
        store.put(f"v1/delta/{number:03}", b"x" * number)
    store.put("v1/deltas/else", b"")
    found = list(store.list("v1/delta/"))
    assert sorted(item.name for item in found) == [f"v1/delta/{n:03}" for n in range(120)]
    assert {item.name: item.size_bytes for item in found}["v1/delta/017"] == 17
    behind = {item.name for item in store.list("v1/delta/", after="v1/delta/117")}
    assert behind == {"v1/delta/118", "v1/delta/119"}
    assert list(store.list("v1/nothing/")) == []


def test_parts_are_the_prefixes_directly_below(store: ObjectStore) -> None:
    for name in ("v1/b/1/x", "v1/a/1/x", "v1/a/2/x", "v1/object", "v1/ab/x", "v2/c/x"):
        store.put(name, b"x")
    assert store.parts("v1/") == ["v1/a/", "v1/ab/", "v1/b/"]
    assert store.parts("v1/a/") == ["v1/a/1/", "v1/a/2/"]
    assert store.parts("v1/a/1/") == []
    assert store.parts("v1/none/") == []
    assert not store.failing()


def test_folder_is_found_by_a_name_with_marks_of_a_url(tmp_path: Path) -> None:
    (tmp_path / "of all hosts").mkdir()
    store = open_store(StoreSettings(f"file://{tmp_path}/of%20all%20hosts"))
    store.put("a/b", b"1")
    assert (tmp_path / "of all hosts" / "a" / "b").read_bytes() == b"1"


def test_folder_goes_with_its_last_object_and_the_mounted_one_stays(tmp_path: Path) -> None:
    store = open_store(StoreSettings(f"file://{tmp_path}"))
    for name in ("a/b/1", "a/b/2", "a/c/3"):
        store.put(name, b"x")
    store.delete(["a/b/1", "a/c/3"])
    assert store.parts("a/") == ["a/b/"]
    store.delete(["a/b/2"])
    assert list(tmp_path.iterdir()) == []
    assert store.put("a/b/1", b"x")


def test_delete_takes_objects_and_passes_over_those_that_are_not_there(store: ObjectStore) -> None:
    for name in ("a", "b", "c"):
        store.put(name, b"")
    store.delete(["a", *(f"none-{number}" for number in range(200)), "b"])
    assert [item.name for item in store.list("")] == ["c"]
    store.delete([])
    assert not store.failing()


def test_probe_says_what_the_store_does_and_leaves_nothing(store: ObjectStore) -> None:
    abilities = store.probe("v1/probe/")
    assert abilities.put_if_absent
    assert abs(abilities.clock_ahead_s) < 60  # its clock is this machine's
    assert list(store.list("v1/probe/")) == []


def test_probe_finds_a_store_that_ignores_put_if_absent() -> None:
    store = open_store(StoreSettings("memory:///"))
    put = store.put
    store.put = lambda name, data, **unused: put(name, data)  # type: ignore[method-assign]
    assert not store.probe("v1/probe").put_if_absent


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("a", 0, 10),
        lambda store: store.put("a", b"x"),
        lambda store: list(store.list("v1/")),  # incident: told as a store that fails
        lambda store: store.parts("v1/"),
        lambda store: store.copy("a", "b"),
        lambda store: store.delete(["a"]),
    ],
)
@pytest.mark.parametrize(
    ("status", "body"), [(403, b""), (401, b""), (404, b"<Error><Code>NoSuchBucket</Code></Error>")]
)
def test_refusal_is_told_apart_and_has_no_secret(
    status: int,
    body: bytes,
    call: Callable[[ObjectStore], Any],
    server: BadServer,
    over_http: Callable[..., ObjectStore],
) -> None:
    server.status, server.body = status, body
    with pytest.raises(TransportError) as caught:
        call(over_http())
    assert caught.value.code == "remote_refused"
    assert SECRET not in str(caught.value)
    assert "s3://bucket/kv" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body"), [(507, b""), (403, b"<Error><Code>QuotaExceeded</Code></Error>")]
)
def test_store_without_room_is_told_apart(
    status: int, body: bytes, server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    server.status, server.body = status, body
    with pytest.raises(TransportError) as caught:
        over_http().put("a", b"x")
    assert caught.value.code == "remote_full"


@pytest.mark.parametrize(
    ("status", "code"), [(401, "remote_refused"), (403, "remote_refused"), (507, "remote_full")]
)
def test_store_that_does_not_take_puts_is_asked_for_all_else(
    status: int, code: str, server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    """Incident: a full bucket was not read from any more."""
    store = over_http()
    for _ in range(breaker_rules.WINDOW):
        server.status = status
        with pytest.raises(TransportError) as caught:
            store.put("a", b"x")
        assert caught.value.code == code
    assert not store.failing()
    assert store.last_failure is None


PUTS_TOO_MUCH = """
import sys
from kvwarehouse.errors import TransportError
from kvwarehouse.remote.object_store import StoreSettings, open_store
try:
    open_store(StoreSettings(f"file://{sys.argv[1]}")).put("a", bytes(1 << 20))
except TransportError as error:
    print(error.code)
"""


def test_folder_without_room_is_told_apart(tmp_path: Path) -> None:
    try:
        with own_mounts():
            mount_tmpfs(tmp_path / "mount", "64k")
            command = [sys.executable, "-P", "-c", PUTS_TOO_MUCH, str(tmp_path / "mount")]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
    except NoMountsError as error:
        pytest.skip(str(error))
    assert ended.stdout.split() == ["remote_full"]


def test_last_failure_is_kept_over_what_succeeds(
    server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    store = over_http()
    assert store.last_failure is None
    server.status = 503
    with pytest.raises(TransportError) as caught:
        store.put("a", b"x")
    server.status = 200
    assert store.put("a", b"x")
    assert store.last_failure is not None
    assert str(store.last_failure) == str(caught.value)


def test_failure_that_is_kept_holds_nothing_of_what_was_put(
    server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    server.status = 503
    store, data = over_http(), np.zeros(10, np.uint8)
    held = weakref.ref(data)
    with contextlib.suppress(TransportError):
        store.put("a", data)
    del data
    gc.collect()
    assert store.last_failure is not None
    assert held() is None


@pytest.mark.parametrize("call", ["get", "put", "list", "copy"])
def test_failure_is_told_without_a_second_try(
    call: str, server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    server.status = 503
    store = over_http()
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("a", 0, 10),
        "put": lambda: store.put("a", b"x"),
        "list": lambda: list(store.list("v1/")),
        "copy": lambda: store.copy("a", "b"),
    }
    with pytest.raises(TransportError) as caught:
        calls[call]()
    assert caught.value.code == "remote_failed"
    assert len(server.requests) == 1
    text = str(caught.value)
    assert "?" not in text
    assert "Debug" not in text


def test_store_that_does_not_answer_ends_the_call_at_its_deadline(
    server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    server.waits = True
    with pytest.raises(TransportError) as caught:
        over_http(get_s=0.2).get("a", 0, 10)
    assert caught.value.code == "remote_failed"
    assert not server.delay.is_set()


def test_deadlines_are_those_of_the_settings() -> None:
    settings = StoreSettings("s3://bucket", connect_s=0.25, get_s=1.5)
    options = _options(settings, "s3", settings.get_s)
    assert options["client_options"]["timeout"] == "1500ms"
    assert options["client_options"]["connect_timeout"] == "250ms"
    assert "allow_http" not in options["client_options"]


def test_body_that_is_cut_is_a_failure(
    server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    server.status, server.body, server.length = 206, b"01234", 10
    with pytest.raises(TransportError):
        over_http().get("a", 0, 10)


def test_store_that_fails_is_not_asked_any_more(
    server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    server.status = 500
    store = over_http()
    for _ in range(breaker_rules.FAILURES):
        with pytest.raises(TransportError):
            store.get("a", 0, 10)
    assert store.failing()
    with pytest.raises(TransportError) as caught:
        store.get("a", 0, 10)
    assert caught.value.code == "remote_off"
    assert len(server.requests) == breaker_rules.FAILURES


def test_server_that_is_gone_is_a_failure(
    server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    server.url = f"http://127.0.0.1:{free_port()}"  # its own may be another's once it is gone
    with pytest.raises(TransportError) as caught:
        over_http().get("a", 0, 10)
    assert caught.value.code == "remote_failed"


def test_first_byte_of_an_object_is_told_before_the_others() -> None:
    store = open_store(StoreSettings("memory:///"))
    store.put("a", b"0123456789")
    told: list[str] = []
    assert store.get("a", 2, 5, lambda: told.append("a")) == b"234"
    assert store.get("b", 0, 1, lambda: told.append("b")) is None
    assert told == ["a"]


def test_probe_whose_object_is_not_there_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: the worker ended by it, as by a bug."""
    store = open_store(StoreSettings("memory:///"))

    def gone(*unused: Any) -> Any:
        raise FileNotFoundError("404 Not Found")

    monkeypatch.setattr(store._obstore, "head", gone)
    with pytest.raises(TransportError, match="head: memory:"):
        store.probe("v1/probe/")


class HangingCalls:
    """Gets from a folder on a mount that hangs: the thread is in the kernel, and nobody ends it."""

    def __init__(self) -> None:
        self.clock = Clock()
        settings = StoreSettings("memory:///", get_s=1.5)
        plain = open_store(settings)
        self.store = ObjectStore(plain._reads, plain._writes, settings, self.clock)
        self._obstore, self._hangs = plain._obstore, threading.Event()
        self._released = threading.Event()
        self._threads: list[threading.Thread] = []
        self.store._obstore = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._obstore, name)

    def get(self, *unused: Any, **also: Any) -> Any:
        self._hangs.set()
        assert self._released.wait(60)
        return SimpleNamespace(bytes=bytes)

    def begin(self) -> None:
        self._hangs.clear()
        self._threads.append(threading.Thread(target=self.store.get, args=("a", 0, 1)))
        self._threads[-1].start()
        assert self._hangs.wait(60)

    def end(self) -> None:
        self._released.set()
        for thread in self._threads:
            thread.join(60)


def test_calls_that_hang_open_the_breaker_from_their_deadline_on() -> None:
    calls = HangingCalls()
    for _ in range(breaker_rules.FAILURES):
        calls.begin()
    assert not calls.store.failing()
    calls.clock.now_s += 1.6
    assert calls.store.longest_call_s() == pytest.approx(1.6)
    assert calls.store.failing()
    assert "has not answered" in str(calls.store.last_failure)
    with pytest.raises(TransportError, match="failed too often"):
        calls.store.put("b", b"")
    calls.end()
    assert calls.store.longest_call_s() == 0
    assert calls.store.failing()  # what came too late says nothing
    calls.clock.now_s += breaker_rules.FIRST_PROBE_S
    assert calls.store.put("b", b"")
    assert not calls.store.failing()


def test_call_that_was_late_and_ended_well_has_failed() -> None:
    calls = HangingCalls()
    calls.begin()
    calls.clock.now_s += 1.6
    assert not calls.store.failing()
    calls.end()
    for _ in range(breaker_rules.FAILURES - 1):
        calls.store.breaker.failed()
    assert calls.store.failing()


@pytest.mark.parametrize("url", ["http://host/x", "bucket", "s3n://x?token=1"])
def test_url_of_no_store_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(StoreSettings(url))
    assert caught.value.code == "remote_url"
    assert "token" not in str(caught.value)


def test_folder_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        open_store(StoreSettings(f"file://{tmp_path}/mount"))
    assert not (tmp_path / "mount").exists()


def test_folder_that_went_is_a_failure_and_nothing_is_put_beside_it(tmp_path: Path) -> None:
    """Incident: obstore made the path anew and filled the host's own disk, where a mount was
    gone; and a listing of it said that the fleet has nothing."""
    folder, away = tmp_path / "mount", tmp_path / "away"
    folder.mkdir()
    store = open_store(StoreSettings(f"file://{folder}"))
    store.put("v1/a", b"1")
    folder.rename(away)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: store.put("v1/b", b"1"),
        lambda: store.copy("v1/a", "v1/b"),
        lambda: list(store.list("v1/")),
        lambda: store.get("v1/a", 0, 1),
    )
    for call in calls[:2]:
        with pytest.raises(TransportError, match="mount it again") as caught:
            call()
        assert caught.value.code == "remote_failed"
        assert not folder.exists()
    folder.mkdir()  # the mount point itself
    for call in calls[2:]:
        with pytest.raises(TransportError, match="mount it again"):
            call()
    assert list(folder.iterdir()) == []
    folder.rmdir()
    away.rename(folder)
    assert store.get("v1/a", 0, 1) == b"1"


def test_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(Clock())
    for _ in range(breaker_rules.FAILURES - 1):
        assert breaker.admit()
        breaker.failed()
    breaker.succeeded()
    for _ in range(breaker_rules.FAILURES):
        assert breaker.admit()
        breaker.failed()
    assert not breaker.admit()
    assert (breaker.is_open, breaker.times_opened) == (True, 1)


def test_breaker_opens_when_half_of_the_last_calls_failed() -> None:
    breaker = Breaker(Clock())
    for _ in range(breaker_rules.WINDOW // 2 - 1):
        breaker.failed()
        breaker.succeeded()
    breaker.succeeded()
    assert breaker.admit()
    breaker.failed()
    assert not breaker.admit()


def test_open_breaker_admits_one_probe_at_ever_longer_intervals() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(breaker_rules.FAILURES):
        breaker.failed()
    wait_s = breaker_rules.FIRST_PROBE_S
    for _ in range(8):
        clock.now_s += wait_s - 0.01
        assert not breaker.admit()
        clock.now_s += 0.02
        assert breaker.admit()
        assert not breaker.admit()
        breaker.failed()
        wait_s = min(2 * wait_s, breaker_rules.LAST_PROBE_S)
    clock.now_s += wait_s + 0.01
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.admit()
    assert not breaker.is_open


def test_breaker_that_a_probe_closed_has_forgotten_what_was_before() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(breaker_rules.WINDOW // 2):
        breaker.succeeded()
        breaker.failed()
    assert breaker.is_open
    clock.now_s += breaker_rules.FIRST_PROBE_S
    assert breaker.admit()
    breaker.succeeded()
    breaker.failed()
    assert not breaker.is_open


def test_success_of_a_call_from_before_does_not_close_the_breaker() -> None:
    breaker = Breaker(Clock())
    for _ in range(breaker_rules.FAILURES):
        breaker.failed()
    breaker.succeeded()
    assert breaker.is_open


def test_get_lets_others_run_meanwhile(
    server: BadServer, over_http: Callable[..., ObjectStore]
) -> None:
    server.waits = True
    store = over_http()
    ended = threading.Event()

    def get() -> None:
        with pytest.raises(TransportError):
            store.get("a", 0, 10)
        ended.set()

    server.status = 500
    thread = threading.Thread(target=get)
    thread.start()
    assert server.asked.wait(30)
    assert not ended.is_set()
    server.delay.set()
    thread.join(30)
    assert ended.is_set()

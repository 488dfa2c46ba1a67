"""Bounds of the gRPC service: deadlines, stalled clients, oversized messages, garbage."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from kvwarehouse import errors, wire
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.daemon import admission, interceptors, servers
from kvwarehouse.daemon import deadline as deadline_module
from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.watchdog import Watchdog
from kvwarehouse.types import Namespace
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.strain import raw_protocols
from testkit.served import Served

T = 30.0
UNPACKED_BYTES = 128 << 20  # packed, an eighth of a megabyte
SPACE = Namespace(model="m", weights="w", dtype="b", layout="l/1", page_tokens=1, page_bytes=8)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as served:
        request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(SPACE))
        served.stub.OpenNamespace(request, timeout=T)
        yield served


def failed(call: object) -> grpc.StatusCode:
    assert callable(call)
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


class Context:
    """What a deadline reads of a call."""

    def __init__(self, remaining: float | None) -> None:
        self._remaining = remaining

    def time_remaining(self) -> float | None:
        return self._remaining


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.parametrize(
    ("given", "longest"),
    [(None, deadline_module.DEFAULT_S), (1e12, deadline_module.DEFAULT_S), (5.0, 5.0),
     (1e6, deadline_module.LONGEST_S), (-1.0, 0.0)],
)  # fmt: skip
@pytest.mark.usefixtures("no_time_passes")
def test_every_call_has_a_deadline(given: float | None, longest: float) -> None:
    assert Deadline.of(Context(given)).remaining_s() == longest  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_time_passes")
def test_wish_for_time_is_cut_to_what_remains() -> None:
    deadline = Deadline(10)
    assert [deadline.within_s(wanted_s) for wanted_s in (3, 100, 0)] == [3, 10, 10]


def test_check_has_the_hours_that_a_large_tier_takes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a check of 8 TB ended after an hour, each time, and nothing could give it more."""
    hours, watchdogs = [0.0], []
    read, watch = served.core.check, Watchdog.watch
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * hours[0])
    monkeypatch.setattr(deadline_module, "time", clock)

    def watched(watchdog: Watchdog, *call: Any) -> Any:
        watchdogs.append(watchdog)
        return watch(watchdog, *call)

    def read_slowly(ordinal: int, after: int, limit: int, repair: bool) -> dict[str, Any]:
        hours[0] += 7
        watchdogs[-1].look()
        return {**read(ordinal, after, limit, repair), "next": after + 1 if after < 2 else -1}

    monkeypatch.setattr(Watchdog, "watch", watched)
    monkeypatch.setattr(served.core, "check", read_slowly)
    with connect_grpc(f"unix://{served.config.socket}") as client:
        assert [part.done for part in client.check()] == [False, False, True]


def load_request() -> pb.LoadRequest:
    prefix = wire.prefix_to_wire(np.arange(9), None)
    return pb.LoadRequest(namespace_id=SPACE.id, prefix=prefix, timeout_s=1000)


def test_load_that_waits_ends_with_its_deadline(served: Served) -> None:
    served.engine.unblock_loads.clear()
    try:
        answers = list(served.stub.Load(load_request(), timeout=0.3))
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    else:  # the daemon's own bound on the wait came first
        assert dict(answers[-1].summary.missed) == {"timeout": 9}
    served.engine.unblock_loads.set()
    list(served.stub.Load(load_request(), timeout=T))


def test_load_whose_client_went_away_gives_its_place_back(served: Served) -> None:
    served.engine.unblock_loads.clear()
    for _ in range(served.config.streams):
        served.engine.loads_blocked.clear()
        answers = served.stub.Load(load_request(), timeout=T)
        assert served.engine.loads_blocked.wait(T)
        answers.cancel()
    served.engine.unblock_loads.set()

    def has_room() -> bool:
        try:
            assert list(served.stub.Load(load_request(), timeout=T))[-1].summary.pages == 0
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False
        return True

    eventually(has_room, "the places come back")


def greeted(path: str) -> socket.socket:
    """A connection that says what HTTP/2 begins with, and no more."""
    there = socket.socket(socket.AF_UNIX)
    there.settimeout(T)  # gRPC's keepalive ends it, later
    there.connect(path)
    with contextlib.suppress(OSError):  # closed already
        there.sendall(raw_protocols.PREFACE + raw_protocols.frame(raw_protocols.SETTINGS, 0, 0))
    return there


def is_closed(there: socket.socket) -> bool:
    """Once it has told its greeting, or been hung up on."""
    with contextlib.suppress(ConnectionResetError):
        return not there.recv(1024)
    return True


def test_connections_of_the_unix_socket_beyond_the_bound_are_closed_and_find_room_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(servers, "IDLE_S", 10 * DEADLINE_S)  # what makes room is the close alone
    with Served(tmp_path) as served, contextlib.ExitStack() as stack:
        path = served.config.grpc_socket
        held = [stack.enter_context(greeted(path)) for _ in range(8)]
        assert not any(is_closed(there) for there in held)
        for _ in range(3):
            assert is_closed(stack.enter_context(greeted(path)))
        assert failed(lambda: served.stub.Status(pb.StatusRequest(), timeout=T)) is (
            grpc.StatusCode.UNAVAILABLE
        )
        held[0].close()

        def served_again() -> bool:
            with contextlib.suppress(grpc.RpcError), served.connect() as there:
                request = pb.StatusRequest()
                return bool(wire.WarehouseStub(there).Status(request, timeout=T).status.name)
            return False

        eventually(served_again, "there is room again")


def test_silent_connection_of_the_unix_socket_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(servers, "IDLE_S", 1.0)
    with Served(tmp_path) as served, socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(T)
        silent.connect(served.config.grpc_socket)
        with greeted(served.config.grpc_socket) as idle:
            for there in (silent, idle):
                while not is_closed(there):
                    pass


def test_store_that_stands_still_is_ended(tmp_path: Path, patience: Any) -> None:
    """A client that opens a store and sends nothing more must not hold a place for ever."""
    with Served(tmp_path) as served:
        silent = threading.Event()

        def requests() -> Iterator[pb.StoreRequest]:
            yield pb.StoreRequest(header=pb.StoreHeader())
            silent.wait(T)

        def nothing() -> Iterator[pb.StoreRequest]:
            silent.wait(T)
            yield from ()

        # The first is refused for what it says, at once; the second says nothing, and is ended.
        assert failed(lambda: served.stub.Store(requests())) == grpc.StatusCode.NOT_FOUND
        store = served.stub.Store.future(nothing())

        def ended() -> bool:
            patience.end()
            return bool(store.done())

        eventually(ended, "the store is ended")
        silent.set()
        assert store.code() == grpc.StatusCode.CANCELLED
        # The daemon's own look may have come first, and say so yet.
        eventually(lambda: served.events("stream_stalled"), "it is said")
        assert served.events("stream_stalled")[0]["why"] == "stalled"


def test_load_that_waits_for_the_daemon_does_not_stand_still(tmp_path: Path, patience: Any) -> None:
    """What the daemon does for a stream has bounds of its own; only its client can let it stand."""
    with Served(tmp_path) as served:
        request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(SPACE))
        served.stub.OpenNamespace(request, timeout=T)
        served.engine.unblock_loads.clear()
        answers = served.stub.Load(load_request(), timeout=T)
        assert served.engine.loads_blocked.wait(T)
        patience.end()
        served.engine.unblock_loads.set()
        assert dict(list(answers)[-1].summary.missed) == {"missing": 9}
        # An OpenNamespace may be among them, whose end gRPC had not told yet.
        stalled = [line["method"] for line in served.events("stream_stalled")]
        assert f"/{wire.SERVICE_NAME}/Load" not in stalled


def test_message_beyond_the_bound_is_refused_and_the_next_is_served(served: Served) -> None:
    with grpc.insecure_channel(f"unix:{served.config.grpc_socket}") as unbounded:
        stub = wire.WarehouseStub(unbounded)
        large = pb.LookupRequest(
            namespace_id=SPACE.id, prefix=pb.Prefix(tokens=bytes(wire.MAX_MESSAGE_BYTES))
        )
        with pytest.raises(grpc.RpcError) as caught:
            stub.Lookup(large, timeout=T)
        error = wire.error_from_rpc(caught.value, address="test")
        assert error.code == "message_too_large"
        assert not error.retryable
        long = pb.LookupRequest(
            namespace_id=SPACE.id, prefix=pb.Prefix(tokens=bytes(4 * wire.MAX_TOKENS + 4))
        )
        with pytest.raises(grpc.RpcError) as caught:
            stub.Lookup(long, timeout=T)
        assert wire.error_from_rpc(caught.value, address="test").code == "too_many_tokens"
        stub.Status(pb.StatusRequest(), timeout=T)


def test_metadata_beyond_the_bound_is_refused_and_the_next_is_served(served: Served) -> None:
    long = [("x", "a" * 2 * servers.METADATA_BYTES)]
    call = lambda: served.stub.Status(pb.StatusRequest(), metadata=long, timeout=T)  # noqa: E731
    assert failed(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    served.stub.Status(pb.StatusRequest(), timeout=T)


@pytest.mark.parametrize("how", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_message_is_refused_and_never_unpacked(
    tmp_path: Path, how: grpc.Compression
) -> None:
    """Incident: grpcio 1.76 and 1.78 unpacked a message whole, and then found it too large."""
    options = [("grpc.max_send_message_length", -1)]
    with (
        Serving(tmp_path) as serving,
        grpc.insecure_channel(f"unix:{serving.socket}.grpc", options) as channel,
    ):
        call = channel.unary_unary(f"/{wire.SERVICE_NAME}/Lookup")
        wire.WarehouseStub(channel).Status(pb.StatusRequest(), timeout=T)
        before = most_memory_bytes(serving.pid)
        for size in (1000, UNPACKED_BYTES):
            status = failed(lambda size=size: call(bytes(size), timeout=4 * T, compression=how))
            assert status == grpc.StatusCode.UNIMPLEMENTED
        assert most_memory_bytes(serving.pid) - before < UNPACKED_BYTES // 2
        wire.WarehouseStub(channel).Status(pb.StatusRequest(), timeout=T)


def most_memory_bytes(pid: int) -> int:
    """What the process had resident at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_longest_prefix_is_served(served: Served) -> None:
    prefix = wire.prefix_to_wire(np.arange(wire.MAX_TOKENS, dtype=np.uint32), None)
    header = pb.StoreHeader(namespace_id=SPACE.id, prefix=prefix, pages=0)
    parts = [pb.StoreRequest(header=header)]
    assert served.stub.Store(iter(parts), timeout=T).stored == 0


@pytest.mark.parametrize("kind", ["noise", "http1", "silence", "half", "local"])
def test_garbage_on_the_socket_leaves_the_daemon_up(served: Served, kind: str, seed: int) -> None:
    noise = np.random.default_rng(seed).bytes(100_000)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    text = {
        "noise": noise, "http1": b"GET / HTTP/1.1\r\n\r\n", "silence": b"",
        "half": preface + noise, "local": b"KVW1" + bytes(28),
    }[kind]  # fmt: skip
    for _ in range(5):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.settimeout(T)
            raw.connect(served.config.grpc_socket)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.sendall(text)
    served.stub.Status(pb.StatusRequest(), timeout=T)
    assert not served.events("rpc_failed")


def test_garbage_in_a_message_is_an_error_of_the_call(served: Served) -> None:
    for method in ("Lookup", "Clear", "OpenNamespace"):
        call = served.channel.unary_unary(f"/{wire.SERVICE_NAME}/{method}")
        status = failed(lambda call=call: call(b"\xff" * 100, timeout=T))
        assert status == grpc.StatusCode.INVALID_ARGUMENT
    served.stub.Status(pb.StatusRequest(), timeout=T)


@pytest.mark.parametrize(
    "method",
    [f"/{wire.SERVICE_NAME}/Status", f"/{wire.SERVICE_NAME}/Store", "/grpc.health.v1.Health/Watch",
     "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"],
)  # fmt: skip
def test_messages_that_are_none_leave_no_place_taken(served: Served, method: str) -> None:
    """Incident: gRPC ended such a call beside us and never said that it was over: each kept its
    place for good, until the daemon refused all calls."""
    places = interceptors.threads_of(served.config.streams)
    for _ in range(4):
        calls = [
            served.channel.stream_stream(method)(iter([b"\xff"]), timeout=T) for _ in range(places)
        ]
        assert grpc.StatusCode.OK not in [call.code() for call in calls]

    def has_room() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(served.stub.Status(pb.StatusRequest(), timeout=T))
        return False

    eventually(has_room, "all places are given back")


def test_unknown_method_is_unimplemented(served: Served) -> None:
    call = served.channel.unary_unary(f"/{wire.SERVICE_NAME}/RunScript")
    assert failed(lambda: call(b"", timeout=T)) == grpc.StatusCode.UNIMPLEMENTED


def test_administration_beyond_its_bound_is_refused_while_status_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, entered = threading.Event(), threading.Semaphore(0)

    def flush(_self: object, timeout_s: float) -> dict[str, int]:
        entered.release()
        go_on.wait(T)
        return {"flushed": 0, "not_admitted": 0, "pending": 0}

    monkeypatch.setattr(type(served.core), "flush", flush)
    held = [served.stub.Flush.future(pb.FlushRequest(), timeout=T) for _ in range(8)]
    for _ in held:
        assert entered.acquire(timeout=T)
    with pytest.raises(grpc.RpcError) as caught:
        served.stub.Flush(pb.FlushRequest(), timeout=T)
    error = wire.error_from_rpc(caught.value, address="test")
    assert (type(error), error.code) == (errors.CapacityError, "too_many_calls")
    assert (
        'kvwarehouse_refused_calls_total{reason="too_many_calls"} 1\n' in served.get("/metrics")[1]
    )
    served.stub.Status(pb.StatusRequest(), timeout=T)
    go_on.set()
    for call in held:
        call.result()


def test_sockets_and_files_are_for_their_owner_only(served: Served) -> None:
    facts = os.stat(served.config.grpc_socket)
    assert stat.S_ISSOCK(facts.st_mode)
    assert stat.S_IMODE(facts.st_mode) == 0o600
    for root, _, names in os.walk(os.path.dirname(served.config.arena_dir)):
        for name in names:
            assert os.lstat(os.path.join(root, name)).st_mode & 0o077 == 0, name

"""What one host may hold of gRPC over TCP: calls that say nothing, answers that nobody takes,
streams and watchers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvwarehouse import core, wire
from kvwarehouse.daemon import interceptors, servers
from kvwarehouse.daemon.admission import Refusals
from kvwarehouse.types import Namespace
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.strain import raw_protocols
from testkit.served import Served
from testkit.tcp import TOKEN, T, bearer, channel, failed, port_of, refused


class Raw:
    """HTTP/2 by hand, from an address of its own: calls that no library of ours would make."""

    def __init__(self, served: Served, host: str, *, takes_messages: bool = True) -> None:
        there = ("127.0.0.1", port_of(served))
        self._socket = socket.create_connection(there, DEADLINE_S, source_address=(host, 0))
        no_window = (4).to_bytes(2, "big") + bytes(4)  # SETTINGS_INITIAL_WINDOW_SIZE: 0
        settings = b"" if takes_messages else no_window
        self._socket.sendall(
            raw_protocols.PREFACE + raw_protocols.frame(raw_protocols.SETTINGS, 0, 0, settings)
        )
        self._last = -1

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, method: str, sent: bytes = b"") -> None:
        """Opens a call, says `sent` of its message, and no more."""
        self._last += 2
        said = raw_protocols.call_head(self._last, method, TOKEN)
        self._socket.sendall(
            said + raw_protocols.frame(raw_protocols.DATA, 0, self._last, sent) * bool(sent)
        )

    def ask(self, method: str, message: bytes = b"") -> None:
        """A whole call, but for reading what it is told."""
        self.call(method)
        self._socket.sendall(raw_protocols.call_data(self._last, message))


def stalled(served: Served) -> int:
    return sum(line["count"] for line in served.events("stream_stalled"))


def test_call_without_a_token_takes_no_place_of_those_with_one(
    tmp_path: Path, tokens: str, patience: Any
) -> None:
    """Incident: a stranger's calls took all places, those in which calls wait for a thread too, and
    an owner's call was refused as one too many."""
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        channel(served, None) as there,
        Raw(served, "127.0.0.2") as one,
        Raw(served, "127.0.0.3") as other,
    ):
        threads = interceptors.threads_of(served.config.streams)
        for _ in range(threads // 2):
            for raw in (one, other):
                raw.call("/kvwarehouse.v1.Warehouse/Status")
        watchdog = served._daemon._watchdog
        eventually(lambda: len(watchdog._watched) == threads, "all threads are taken")
        stub = wire.WarehouseStub(there)  # type: ignore[no-untyped-call, unused-ignore]
        for metadata in (None, bearer("x" * len(TOKEN))):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Status(pb.StatusRequest(), metadata=metadata, timeout=T)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        patience.end()


@pytest.mark.parametrize("sent", [b"", b"\0" + (1 << 20).to_bytes(4, "big") + bytes(1000)])
@pytest.mark.parametrize(
    "method",
    ["/kvwarehouse.v1.Warehouse/Status", "/kvwarehouse.v1.Warehouse/Lookup",
     "/grpc.health.v1.Health/Check"],
)  # fmt: skip
def test_calls_that_do_not_say_what_they_ask_leave_half_of_the_threads_and_are_ended(
    tmp_path: Path, tokens: str, patience: Any, method: str, sent: bytes
) -> None:
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        channel(served, None) as there,
        Raw(served, "127.0.0.2") as raw,
    ):
        stub = wire.WarehouseStub(there)
        threads = interceptors.threads_of(served.config.streams)
        for _ in range(threads):
            raw.call(method, sent)
        eventually(lambda: refused(served, "too_many_calls") == threads // 2, "half are refused")
        for _ in range(3):
            stub.Status(pb.StatusRequest(), metadata=bearer(TOKEN), timeout=T)

        def all_ended() -> bool:
            patience.end()
            return stalled(served) >= threads // 2

        eventually(all_ended, "those that are held are ended")
        raw.call("/kvwarehouse.v1.Warehouse/Nothing")
        stub.Status(pb.StatusRequest(), metadata=bearer(TOKEN), timeout=T)

        def taken_again() -> bool:
            raw.call(method, sent)
            patience.end()
            return stalled(served) > threads // 2

        eventually(taken_again, "there is room again")


@pytest.mark.parametrize(
    "method", ["/kvwarehouse.v1.Warehouse/Status", "/grpc.health.v1.Health/Check"]
)
def test_answers_that_nobody_takes_are_half_of_the_calls_and_are_given_up(
    tmp_path: Path, tokens: str, patience: Any, method: str
) -> None:
    """Incident: they lay in the daemon's memory for as long as the connection stood, 64 a
    connection."""
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens, streams=4) as served,
        channel(served, None) as there,
        Raw(served, "127.0.0.2", takes_messages=False) as raw,
    ):
        stub = wire.WarehouseStub(there)
        threads = interceptors.threads_of(served.config.streams)

        for _ in range(threads):
            raw.ask(method)
        eventually(lambda: refused(served, "too_many_calls") == threads // 2, "half are refused")
        stub.Status(pb.StatusRequest(), metadata=bearer(TOKEN), timeout=T)

        def ended(answers: int) -> bool:
            patience.end()
            return stalled(served) >= answers

        eventually(lambda: ended(threads // 2), "those that are held are given up")

        def taken_again() -> bool:
            raw.ask(method)
            return ended(threads // 2 + 1)

        eventually(taken_again, "there is room again")


def test_call_that_nobody_reads_may_say_a_bounded_amount_however_fast_it_comes(
    tmp_path: Path, tokens: str
) -> None:
    """Incident: gRPC let each call of a fast connection lay 32 MiB into the daemon's memory."""
    size = 7 << 20
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        socket.create_connection(("127.0.0.1", port_of(served)), DEADLINE_S) as there,
        there.makefile("rb") as heard,
    ):
        there.sendall(raw_protocols.PREFACE + raw_protocols.frame(raw_protocols.SETTINGS, 0, 0))
        of_all, initial, most = 65_535, 65_535, 0
        for call in range(1, 41, 2):
            said = raw_protocols.call_head(call, f"/{wire.SERVICE_NAME}/Store", TOKEN)
            head = b"\0" + size.to_bytes(4, "big")
            there.sendall(said + raw_protocols.frame(raw_protocols.DATA, 0, call, head))
            of_all, own, left = of_all - len(head), initial - len(head), size
            while left:
                if (some := min(of_all, own, left, 16_384)) > 0:  # a window may fall below 0
                    there.sendall(raw_protocols.frame(raw_protocols.DATA, 0, call, bytes(some)))
                    of_all, own, left = of_all - some, own - some, left - some
                    continue
                start = heard.read(9)
                length, kind, acknowledges = (
                    int.from_bytes(start[:3], "big"),
                    start[3],
                    start[4] & 1,
                )
                stream, payload = int.from_bytes(start[5:], "big"), heard.read(length)
                if kind == raw_protocols.WINDOW_UPDATE:
                    more = int.from_bytes(payload, "big")
                    of_all, own = of_all + more * (not stream), own + more * (stream == call)
                elif kind == raw_protocols.SETTINGS and not acknowledges:
                    for at in range(0, length, 6):
                        if int.from_bytes(payload[at : at + 2], "big") == 4:  # the initial window
                            window = int.from_bytes(payload[at + 2 : at + 6], "big")
                            own, initial, most = own + window - initial, window, max(most, window)
                    there.sendall(raw_protocols.frame(raw_protocols.SETTINGS, 1, 0))
                elif kind == raw_protocols.PING and not acknowledges:
                    there.sendall(raw_protocols.frame(raw_protocols.PING, 1, 0, payload))
        assert 0 < most <= servers.WINDOW_BYTES


def test_health_watcher_that_takes_nothing_keeps_nobody_from_asking_and_no_drain(
    tmp_path: Path, tokens: str
) -> None:
    """Incident: its message was sent with the service's lock held; every check of health, and the
    end of the daemon, waited for it."""
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        channel(served, None) as there,
        Raw(served, "127.0.0.2", takes_messages=False) as raw,
    ):
        health = health_pb2_grpc.HealthStub(there)
        watched = health.Watch(
            health_pb2.HealthCheckRequest(), metadata=bearer(TOKEN), timeout=2 * T
        )
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        for _ in range(interceptors.HEALTH_WATCHES):
            raw.ask("/grpc.health.v1.Health/Watch")
        half = interceptors.HEALTH_WATCHES // 2
        eventually(lambda: refused(served, "too_many_watchers") == half, "half are refused")
        health.Check(health_pb2.HealthCheckRequest(), metadata=bearer(TOKEN), timeout=T)
        served.stub.Drain(pb.DrainRequest(), timeout=T)
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_call_is_served_while_those_beyond_another_hosts_share_are_being_refused(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they were refused they had all threads, and whoever else called was refused too."""
    go_on, refusing = threading.Event(), threading.Semaphore(0)
    count = Refusals.count

    def slowly(self: Refusals, reason: str, peer: str) -> None:
        refusing.release()
        go_on.wait(DEADLINE_S)
        count(self, reason, peer)

    monkeypatch.setattr(Refusals, "count", slowly)
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens) as served,
        channel(served, None) as there,
        Raw(served, "127.0.0.2") as raw,
    ):
        threads = interceptors.threads_of(served.config.streams)
        for _ in range(threads):
            raw.call("/kvwarehouse.v1.Warehouse/Status")
        for _ in range(threads // 2):
            assert refusing.acquire(timeout=DEADLINE_S)
        status = wire.WarehouseStub(there).Status.future(
            pb.StatusRequest(), metadata=bearer(TOKEN), timeout=DEADLINE_S
        )
        try:
            status.result(timeout=0.2)  # it may wait, and is not to be refused
        except grpc.FutureTimeoutError:
            pass
        finally:
            go_on.set()
        assert status.result().status.name


def test_host_holds_at_most_half_of_the_streams(tmp_path: Path, tokens: str) -> None:
    with (
        Served(tmp_path, listen="127.0.0.1:0", token_file=tokens, streams=4) as served,
        channel(served, None) as there,
    ):
        space = Namespace(
            model="m", weights="w", dtype="b", layout="l/1", page_tokens=1, page_bytes=8
        )
        opened = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(space))
        served.stub.OpenNamespace(opened, timeout=T)
        prefix = wire.prefix_to_wire(np.arange(9), None)
        request = pb.LoadRequest(namespace_id=space.id, prefix=prefix, timeout_s=1000)
        stub = wire.WarehouseStub(there)
        served.engine.unblock_loads.clear()
        held = []
        for _ in range(2):
            served.engine.loads_blocked.clear()
            held.append(stub.Load(request, metadata=bearer(TOKEN), timeout=T))
            assert served.engine.loads_blocked.wait(T)
        status, error = failed(lambda: list(stub.Load(request, metadata=bearer(TOKEN), timeout=T)))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (error.code, error.retryable) == ("too_many_streams", True)
        assert "half" in error.message
        served.engine.loads_blocked.clear()
        others = served.stub.Load(request, timeout=T)
        assert served.engine.loads_blocked.wait(T)
        served.engine.unblock_loads.set()
        for answers in (*held, others):
            assert dict(list(answers)[-1].summary.missed) == {"missing": 9}


def test_host_holds_at_most_half_of_the_watchers(tmp_path: Path, tokens: str) -> None:
    with (
        Served(tmp_path, engine=core, listen="127.0.0.1:0", token_file=tokens) as served,
        channel(served, None) as there,
    ):
        stub = wire.WarehouseStub(there)
        held = [
            stub.Watch(pb.WatchRequest(), metadata=bearer(TOKEN), timeout=T)
            for _ in range(interceptors.WATCHES // 2)
        ]
        for watch in held:
            next(watch)
        _status, error = failed(
            lambda: next(stub.Watch(pb.WatchRequest(), metadata=bearer(TOKEN), timeout=T))
        )
        assert error.code == "too_many_watchers"
        next(served.stub.Watch(pb.WatchRequest(), timeout=T))

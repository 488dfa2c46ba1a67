"""The HTTP endpoint answers probes, whatever other clients of it do."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvwarehouse.daemon import http
from kvwarehouse.errors import TransportError
from kvwarehouse.wire import status_pb2
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually


class Endpoint:
    def __init__(self) -> None:
        self.taken = 0
        self.may_take = threading.Event()
        self.may_take.set()
        pages = http.StatusPages(self._take, lambda: "", lambda: "recovering")
        self.server = http.HttpServer("127.0.0.1:0", pages)

    def _take(self) -> status_pb2.Status:
        self.taken += 1
        assert self.may_take.wait(DEADLINE_S)
        raise TransportError("no core")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://{self.server.address}{path}", timeout=60
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def connect(self) -> socket.socket:
        host, port = self.server.address.split(":")
        return socket.create_connection((host, int(port)), DEADLINE_S)

    def said(self, request: bytes) -> bytes:
        with self.connect() as there:
            there.sendall(request)
            return _all(there)


def _all(there: socket.socket) -> bytes:
    return b"".join(iter(lambda: there.recv(1 << 16), b""))


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    for bound in ("REQUEST_S", "SILENT_S"):  # on a machine that is busy
        monkeypatch.setattr(http, bound, int(DEADLINE_S))
    made = Endpoint()
    yield made
    made.may_take.set()
    made.server.close()


@pytest.mark.parametrize("clients", [4, 3 * http.CALLS_MAX])
@pytest.mark.parametrize("said", [b"", b"G", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"])
def test_probe_is_answered_beside_clients_that_do_not_finish(
    endpoint: Endpoint, clients: int, said: bytes
) -> None:
    with ExitStack() as stack:
        for _ in range(clients):
            stack.enter_context(endpoint.connect()).sendall(said)
        for _ in range(10):
            assert endpoint.get("/healthz") == (200, "ok\n")
        assert endpoint.get("/readyz") == (503, "recovering\n")
        assert len(endpoint.server._calls) <= http.CALLS_MAX


def test_client_that_has_not_asked_yet_keeps_its_place_beside_those_that_come(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: beside a stranger who opened connections a probe was hung up on, between its
    connect and its first byte."""
    monkeypatch.setattr(http, "CALLS_MAX", 8)
    with endpoint.connect() as there, ExitStack() as stack:
        for _ in range(3 * http.CALLS_MAX):
            stack.enter_context(endpoint.connect()).sendall(b"G")
        assert endpoint.get("/readyz") == (503, "recovering\n")  # behind all of them
        there.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert _all(there).endswith(b"ok\n")


@pytest.mark.parametrize("path", [b"/healthz", b"/metrics"])
def test_request_that_is_there_is_answered_before_it_makes_room(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr(http, "CALLS_MAX", 8)
    busy, go_on = threading.Event(), threading.Event()

    def answer_late() -> str:
        busy.set()
        assert go_on.wait(DEADLINE_S)
        return "x" * (32 << 20)  # so that it keeps its place

    monkeypatch.setitem(endpoint.server._pages._probes, "/late", answer_late)
    with ExitStack() as stack:

        def client(said: bytes) -> socket.socket:
            there = stack.enter_context(endpoint.connect())
            there.sendall(said)
            return there

        oldest = client(b"G")
        eventually(lambda: endpoint.server._calls, "it is taken")
        for _ in range(http.CALLS_MAX - 2):
            client(b"G")
        client(b"GET /late HTTP/1.0\r\n\r\n")
        assert busy.wait(DEADLINE_S)
        newest = client(b"GET /healthz HTTP/1.0\r\n\r\n")
        oldest.sendall(b"ET " + path + b" HTTP/1.0\r\n\r\n")
        go_on.set()
        for there in (oldest, newest):
            assert _all(there).startswith(b"HTTP/1.0 ")


def test_client_that_drips_is_ended(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_S", 0.3)
    with endpoint.connect() as there:
        there.settimeout(0.05)

        def ended() -> bool:
            try:
                there.sendall(b"E")
                return there.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        eventually(ended, "its deadline ends it")


def test_client_that_does_not_read_is_ended(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_S", 0.3)
    answered = threading.Event()

    def answer(path: str) -> http.Answer:
        answered.set()
        return http._text(http.HTTPStatus.OK, "x" * (32 << 20))

    monkeypatch.setattr(endpoint.server._pages, "answer", answer)
    with endpoint.connect() as there:
        there.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert answered.wait(DEADLINE_S)
        eventually(lambda: not endpoint.server._calls, "its deadline ends it")


def test_answer_comes_whole_to_a_client_that_reads_late(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = http._text(http.HTTPStatus.OK, "x" * (32 << 20))
    monkeypatch.setattr(endpoint.server._pages, "answer", lambda path: text)
    assert len(endpoint.said(b"GET /healthz HTTP/1.0\r\n\r\n")) > 32 << 20


def test_probe_is_answered_while_figures_are_waited_for(endpoint: Endpoint) -> None:
    endpoint.may_take.clear()
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(endpoint.get("/metrics"))) for _ in range(9)
    ]
    for thread in threads:
        thread.start()
    eventually(
        lambda: sum(call.asks for call in list(endpoint.server._calls)) == 9, "all have asked"
    )
    assert endpoint.get("/healthz") == (200, "ok\n")
    endpoint.may_take.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert answers == [(503, "no core\n")] * 9
    assert endpoint.taken == 2, "those who ask meanwhile share the next figures"


def test_who_waits_for_figures_makes_no_room_for_those_who_do_not_finish(
    endpoint: Endpoint,
) -> None:
    """Incident: beside a stranger who opened connections, scrapes were hung up on."""
    endpoint.may_take.clear()
    with endpoint.connect() as there, ExitStack() as stack:
        there.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        eventually(lambda: endpoint.taken, "figures are being made")
        for _ in range(3 * http.CALLS_MAX):
            stack.enter_context(endpoint.connect()).sendall(b"G")
        assert endpoint.get("/healthz") == (200, "ok\n")  # behind all of them
        endpoint.may_take.set()
        assert b"no core" in _all(there)


def test_client_that_left_does_not_keep_figures_from_others(endpoint: Endpoint) -> None:
    endpoint.may_take.clear()
    with endpoint.connect() as there:
        there.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        eventually(lambda: endpoint.taken, "figures are being made")
    endpoint.may_take.set()
    assert endpoint.get("/metrics") == (503, "no core\n")


def test_figures_that_fail_are_an_answer(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.server._pages, "_metrics", lambda: 1 // 0)
    assert endpoint.get("/metrics")[0] == 500
    assert endpoint.get("/metrics")[0] == 500


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nA: " + b"b" * http.HEAD_BYTES, b"431"),
        (b"GET /" + b"b" * http.HEAD_BYTES, b"431"),
        (b"POST /healthz HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /healthz\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400"),
        (b"HEAD /readyz HTTP/1.1\r\n\r\n", b"503"),
        (b"GET /healthz?a=b HTTP/1.0\r\nHost: x\r\n\r\n", b"200"),
    ],
)
def test_request_is_answered_by_its_status(
    endpoint: Endpoint, request_text: bytes, status: bytes
) -> None:
    head, _, body = endpoint.said(request_text).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    assert bool(body) != request_text.startswith(b"HEAD")

"""/metrics, /healthz and /readyz over HTTP, for scrapers and orchestrators. Reads only; says
nothing that is secret.

Whoever reaches the address may connect, so who is slow, or many, must not turn a probe into a 503
for which an orchestrator kills the daemon. One thread reads and answers all connections without
waiting for any; each request has a deadline as a whole; a connection that says nothing stays in the
kernel at first; where connections are too many the oldest that has not asked makes room. Figures,
which wait for the core, are made by a thread of their own, for all at once who have asked.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from kvwarehouse.addresses import split_address
from kvwarehouse.daemon import metrics
from kvwarehouse.errors import TransportError, WarehouseError
from kvwarehouse.wire import status_pb2

CALLS_MAX: Final = 64
"""Connections at a time."""

REQUEST_S: Final = 5.0
"""From a connection to the end of its headers, and again from an answer to its end."""

HEAD_BYTES: Final = 8 << 10
"""Request line and headers."""

SILENT_S: Final = 3
"""How long the kernel keeps a connection to itself that has said nothing: its places are not ours,
so that who opens many takes none from a probe that has yet to ask."""

_BACKLOG: Final = 1024
_METRICS: Final = "/metrics"
_BREATH_S: Final = 0.1

Answer = tuple[HTTPStatus, str, str]  # status, content type, text


class StatusPages:
    """What the paths answer. `live` and `ready` return "" or why not."""

    def __init__(
        self,
        snapshot: Callable[[], status_pb2.Status],
        live: Callable[[], str],
        ready: Callable[[], str],
    ) -> None:
        self._snapshot = snapshot
        self._probes = {"/healthz": live, "/readyz": ready}

    def answer(self, path: str) -> Answer:
        path = path.partition("?")[0]
        if path == _METRICS:
            return self._metrics()
        probe = self._probes.get(path)
        if probe is None:
            return _text(HTTPStatus.NOT_FOUND, "paths: /metrics /healthz /readyz")
        problem = probe()
        if problem:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, problem)
        return _text(HTTPStatus.OK, "ok")

    def _metrics(self) -> Answer:
        try:
            return HTTPStatus.OK, metrics.CONTENT_TYPE, metrics.render(self._snapshot())
        except WarehouseError as error:
            # No figures is the truth; zeros would look like a reset.
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, error.message)


def _text(status: HTTPStatus, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", text + "\n"


class _NoRequestError(Exception):
    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class _Call:
    """A connection, from its first byte to its last."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline_s = time.monotonic() + REQUEST_S
        self.head = bytearray()
        self.asks = False  # for figures, which are not there yet
        self.left = b""  # of the answer

    def read(self) -> str | None:
        """The path, once the request is there; None until then. OSError where nothing comes any
        more."""
        while b"\r\n\r\n" not in self.head:
            try:
                more = self.connection.recv(HEAD_BYTES)
            except BlockingIOError:
                return None
            if not more:
                raise ConnectionAbortedError
            self.head += more
            if len(self.head) > HEAD_BYTES:
                raise _NoRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        words = self.head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise _NoRequestError(HTTPStatus.BAD_REQUEST)
        if words[0] not in ("GET", "HEAD"):
            raise _NoRequestError(HTTPStatus.METHOD_NOT_ALLOWED)
        return words[1]

    def answer(self, answer: Answer) -> None:
        status, kind, text = answer
        body = text.encode("utf-8")
        head = (
            f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self.left = head.encode("ascii") + (b"" if self.head.startswith(b"HEAD ") else body)
        self.deadline_s = time.monotonic() + REQUEST_S

    def write(self) -> bool:
        """Whether all has left."""
        with contextlib.suppress(BlockingIOError):
            self.left = self.left[self.connection.send(self.left) :]
        return not self.left


class HttpServer:
    """Serves `pages` at host:port from construction to close(). `address` has the port in use."""

    def __init__(self, address: str, pages: StatusPages) -> None:
        """Raises TransportError (code "address_unavailable") when the address cannot be bound."""
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise TransportError(
                f"cannot serve /metrics at {address}: {error.strerror or error}; probes that "
                "know this address read another's answers. Give each daemon of a host "
                "its own with --http HOST:PORT (port 0: any free one, in the log; off: none)",
                code="address_unavailable",
                retryable=False,
                context={"address": address},
            ) from error
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)
        self._listener.setblocking(False)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._pages = pages
        self._selector = selectors.DefaultSelector()
        self._calls: dict[_Call, None] = {}  # oldest first
        self._served: list[_Call] = []  # by the figures that are being made
        self._asking: list[_Call] = []  # for the next ones
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the end
        self._figures: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._serve, "http"), (self._make_figures, "http-metrics"))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Blocks until figures that are being made are there."""
        self._asked.put(False)
        self._wake.close()
        for thread in self._threads:
            thread.join()

    # --- the thread of figures

    def _make_figures(self) -> None:
        while self._asked.get():
            try:
                answer = self._pages.answer(_METRICS)
            except Exception as error:  # noqa: BLE001  the edge of a thread: others may ask
                answer = _text(HTTPStatus.INTERNAL_SERVER_ERROR, repr(error))
            self._figures.put(answer)
            with contextlib.suppress(OSError):  # closed
                self._wake.send(b"f")

    # --- the thread of connections

    def _serve(self) -> None:
        for each in (self._listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        with self._listener, self._woken, self._selector:
            while True:
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._woken:
                        self._go_on(key.data)
                    elif not self._woken.recv(1):
                        return self._end_all()
                    else:
                        self._tell_figures(self._figures.get())
                self._end_late()

    def _wait_s(self) -> float | None:
        ends = [call.deadline_s for call in self._calls if not call.asks]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return  # it is gone
        except OSError:  # no descriptor is left: one of ours may be given up for it
            if self._calls:
                self._make_room()
            else:
                time.sleep(_BREATH_S)
            return
        if len(self._calls) >= CALLS_MAX:
            self._make_room()
        connection.setblocking(False)
        call = _Call(connection)
        self._calls[call] = None
        self._selector.register(connection, selectors.EVENT_READ, call)
        self._go_on(call)  # what came with the connection is answered before anyone makes room

    def _make_room(self) -> None:
        """First of those who have not asked yet, then of those who do not take their answer: who
        waits for figures has done all that is his."""
        count = len(self._calls)
        while len(self._calls) == count:
            call = min(self._calls, key=lambda call: (call.asks, bool(call.left)))
            if not call.asks and not call.left:
                self._go_on(call)  # its request may be there, behind the same select
                if call not in self._calls or call.asks or call.left:
                    continue
            self._end(call)

    def _go_on(self, call: _Call) -> None:
        if call not in self._calls or call.asks:
            return  # it made room, or was looked at for that, behind the same select
        try:
            if call.left or self._understand(call):
                self._write(call)
        except OSError:
            self._end(call)

    def _understand(self, call: _Call) -> bool:
        """Whether there is an answer."""
        try:
            path = call.read()
        except _NoRequestError as error:
            call.answer(_text(error.status, str(error)))
        else:
            if path is None:
                return False
            if path.partition("?")[0] == _METRICS:
                self._ask_figures(call)
                return False
            call.answer(self._pages.answer(path))
        return True

    def _ask_figures(self, call: _Call) -> None:
        call.asks = True
        self._selector.unregister(call.connection)
        self._asking.append(call)
        if not self._served:
            self._begin_figures()

    def _begin_figures(self) -> None:
        self._served, self._asking = self._asking, []
        self._asked.put(True)

    def _tell_figures(self, answer: Answer) -> None:
        told, self._served = self._served, []
        if self._asking:  # meanwhile: figures from before they asked are not for them
            self._begin_figures()
        for call in told:
            if call in self._calls:
                call.asks = False
                call.answer(answer)
                self._selector.register(call.connection, selectors.EVENT_WRITE, call)
                self._go_on(call)

    def _write(self, call: _Call) -> None:
        if call.write():
            call.connection.shutdown(socket.SHUT_WR)
            self._end(call)
        else:
            self._selector.modify(call.connection, selectors.EVENT_WRITE, call)

    def _end_late(self) -> None:
        now = time.monotonic()
        for call in [call for call in self._calls if call.deadline_s <= now and not call.asks]:
            self._end(call)

    def _end(self, call: _Call) -> None:
        del self._calls[call]
        if not call.asks:
            self._selector.unregister(call.connection)
        call.connection.close()

    def _end_all(self) -> None:
        for call in list(self._calls):
            self._end(call)

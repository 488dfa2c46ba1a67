"""/metrics, /healthz and /readyz over HTTP, for scrapers and orchestrators. Reads only; says
nothing that is secret.

A few threads of its own; a request beyond them is answered 503 at once, and a slow client is cut,
so that nothing here can grow or hold the daemon.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

from kvwarehouse import metrics
from kvwarehouse.errors import TransportError, WarehouseError
from kvwarehouse.settings import split_address

_THREADS: Final = 4
_CLIENT_TIMEOUT_S: Final = 5.0
_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"

Answer = tuple[HTTPStatus, str, str]  # status, content type, text


class Pages:
    """What the paths answer. `live` and `ready` return "" or why not."""

    def __init__(
        self,
        snapshot: Callable[[], metrics.Snapshot],
        live: Callable[[], str],
        ready: Callable[[], str],
    ) -> None:
        self._snapshot = snapshot
        self._probes = {"/healthz": live, "/readyz": ready}

    def answer(self, path: str) -> Answer:
        path = path.partition("?")[0]
        if path == "/metrics":
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


class HttpServer:
    """Serves `pages` at host:port from construction to close(). `address` has the port in use."""

    def __init__(self, address: str, pages: Pages) -> None:
        """Raises TransportError (code "address_unavailable") when the address cannot be bound."""
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = _Bounded(family, (host, port), pages)
        except OSError as error:
            raise TransportError(
                f"cannot serve /metrics at {address}: {error.strerror or error}; free the port, or "
                "choose with --http (port 0: any free one; off: none)",
                code="address_unavailable",
                retryable=False,
                context={"address": address},
            ) from error
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"{shown}:{self._server.server_address[1]}"
        self._ending, ended = socket.socketpair()
        self._thread = threading.Thread(
            target=self._server.serve_until, args=(ended,), name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._ending.close()
        self._thread.join()
        self._server.server_close()


class _Bounded(HTTPServer):
    """A few requests at a time."""

    request_queue_size = 16

    def __init__(self, family: int, where: tuple[str, int], pages: Pages) -> None:
        self.address_family = family
        self.pages = pages
        self._places = threading.BoundedSemaphore(_THREADS)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="http")
        super().__init__(where, _Request)

    def serve_until(self, ended: socket.socket) -> None:
        """Serves until the other end of `ended` is closed. serve_forever() looks for its end now
        and then alone, which every stop of a daemon would wait for."""
        self.socket.setblocking(False)  # who has called may be gone when its call is taken
        with ended, selectors.DefaultSelector() as selector:
            for each in (self.socket, ended):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if ended in ready:
                    return
                with contextlib.suppress(OSError):
                    self.process_request(*self.get_request())

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            request.settimeout(0.1)
            with contextlib.suppress(OSError):
                request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        try:
            self._pool.submit(self._serve, request, client_address)
        except RuntimeError:  # no thread can be started
            self._places.release()
            self.shutdown_request(request)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # a client that went away
        finally:
            self.shutdown_request(request)
            self._places.release()

    def server_close(self) -> None:
        super().server_close()
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Request(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S  # of every read and write
    server_version = "kvwarehouse"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        assert isinstance(self.server, _Bounded)
        status, kind, text = self.server.pages.answer(self.path)
        body = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no events."""

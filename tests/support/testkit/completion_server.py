"""A contract double of an OpenAI-compatible server: real HTTP, streamed events, no model.

It answers /v1/completions as vLLM does, and on request as badly as servers do: `manners` lists
how, one a request, the last one for all that follow. What was asked is kept. Thread-safe.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_PAUSE_S = 0.01


class CompletionServer:
    """Manners: good, cached (usage says half of the prompt), plain (no usage), late (good, once
    `release` is set), never (nothing, until it closes), drip (a byte now and then, without end),
    flood (tokens without end), status (500), refuse:FIELD (400 while the request has it), html,
    malformed, list, error, cut (half an answer), empty (no token), abort (a finish of its own),
    silence (hangs up before any answer), short (one token)."""

    def __init__(self, *manners: str) -> None:
        self.manners: Sequence[str] = manners or ("good",)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()
        self.closing = threading.Event()
        self.lock = threading.Lock()
        server = self

        class Handler(_Handler):
            owner = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: CompletionServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner = self.owner
        with owner.lock:
            place = len(owner.asked)
            owner.asked.append(body)
            owner.headers.append(dict(self.headers))
        manner, _, field = owner.manners[min(place, len(owner.manners) - 1)].partition(":")
        try:
            getattr(self, f"_{manner}")(body, field)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    # --- manners

    def _good(self, body: dict[str, Any], _: str) -> None:
        self._stream(body, body["max_tokens"], {})

    def _cached(self, body: dict[str, Any], _: str) -> None:
        half = {"prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 2}}
        self._stream(body, body["max_tokens"], half)

    def _plain(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        self._tokens(body["max_tokens"])
        self._end()

    def _short(self, body: dict[str, Any], _: str) -> None:
        self._stream(body, 1, {})

    def _late(self, body: dict[str, Any], _: str) -> None:
        self.owner.release.wait()
        self._good(body, _)

    def _never(self, body: dict[str, Any], _: str) -> None:
        self.owner.closing.wait()
        self.close_connection = True

    def _drip(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        while not self.owner.closing.wait(_PAUSE_S):
            self._chunk(b":")

    def _flood(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        while not self.owner.closing.is_set():
            self._event({"choices": [{"text": "w", "finish_reason": None}]})

    def _status(self, body: dict[str, Any], _: str) -> None:
        self._refusal(500, "the engine is dead")

    def _refuse(self, body: dict[str, Any], field: str) -> None:
        if field in body:
            self._refusal(400, f"unexpected field {field}")
        else:
            self._good(body, "")

    def _html(self, body: dict[str, Any], _: str) -> None:
        self._whole(200, "text/html", b"<h1>It works</h1>")

    def _malformed(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        self._tokens(1)
        self._chunk(b"data: {not json\n\n")
        self._end()

    def _list(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        self._chunk(b"data: [1, 2]\n\n")
        self._end()

    def _error(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        self._tokens(1)
        self._event({"error": {"message": "out of blocks"}})
        self._end()

    def _cut(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        self._tokens(2)
        self.close_connection = True

    def _empty(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        self._end()

    def _abort(self, body: dict[str, Any], _: str) -> None:
        self._begin()
        self._event({"choices": [{"text": "w", "finish_reason": "abort"}]})
        self._end()

    def _silence(self, body: dict[str, Any], _: str) -> None:
        self.close_connection = True

    # --- the wire

    def _stream(self, body: dict[str, Any], tokens: int, more: dict[str, Any]) -> None:
        self._begin()
        self._tokens(tokens)
        if "stream_options" in body:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens, **more}
            self._event({"choices": [], "usage": usage})
        self._end()

    def _tokens(self, count: int) -> None:
        for at in range(count):
            finish = "length" if at == count - 1 else None
            # Every third has no text yet: half of a character.
            text = "" if at % 3 == 2 and finish is None else "w"
            self._event({"choices": [{"text": text, "finish_reason": finish}]})

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, value: Any) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _end(self) -> None:
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _refusal(self, status: int, message: str) -> None:
        self._whole(status, "application/json", json.dumps({"error": message}).encode())

    def _whole(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

"""A daemon in this process over the real engine, for requests that are fuzz: whatever a client
sends is answered with a status that says whose fault it is, and never with INTERNAL.

One owner; not thread-safe.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from google.protobuf.message import DecodeError

import kvwarehouse as kvw
from kvwarehouse import core
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from testkit.served import Served

SPACE: Final = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=512
)
NODES: Final = [1, 2, 3]
_MOST_S: Final = 30.0
_CHECK_EVERY: Final = 256

# Not Drain: it ends the service that the others need.
UNARY: Final = (
    ("OpenNamespace", pb.OpenNamespaceRequest),
    ("Lookup", pb.LookupRequest),
    ("ListPages", pb.ListPagesRequest),
    ("Clear", pb.ClearRequest),
    ("Evict", pb.EvictRequest),
    ("Flush", pb.FlushRequest),
    ("Load", pb.LoadRequest),
    ("Store", pb.StoreRequest),
    ("Check", pb.CheckRequest),
    ("WhoHas", pb.WhoHasRequest),
    ("Keep", pb.KeepRequest),
    ("ListKeeps", pb.ListKeepsRequest),
    ("RemoveKeeps", pb.RemoveKeepsRequest),
    ("Why", pb.WhyRequest),
    ("NoteRequests", pb.NoteRequestsRequest),
    ("ListRequests", pb.ListRequestsRequest),
    ("Watch", pb.WatchRequest),
)
_STREAMED: Final = ("Load", "Check")
_ENDLESS: Final = ("Watch",)
_OUR_FAULT: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_TOKENS: Final = np.asarray(NODES, np.uint32)


class LiveService:
    def __init__(self, folder: Path) -> None:
        arena = tempfile.mkdtemp(dir=folder)
        self._served = Served(folder, engine=core, arena_dir=arena, dram="8MiB", http="off")
        self._served.start()
        self._client = kvw.connect(f"unix://{self._served.config.socket}", timeout_s=_MOST_S)
        self._calls = 0

    def call(self, data: bytes) -> None:
        """Nothing happens for bytes that are no message of that type: the library refuses them."""
        method, kind = UNARY[data[0] % len(UNARY)] if data else UNARY[0]
        try:
            request: Any = kind.FromString(data[1:])
        except DecodeError:
            return
        if method in ("Clear", "Evict"):
            request.ClearField("target")  # what is good stays, so that it can be checked
        try:
            self._send(method, request, data[1:])
        except grpc.RpcError as error:
            if error.code() in _OUR_FAULT or not error.details():
                raise AssertionError(f"{method}: {error.code()} {error.details()!r}") from error
        self._calls += 1
        if self._calls % _CHECK_EVERY == 0:
            self.check()

    def _send(self, method: str, request: Any, data: bytes) -> None:
        stub = self._served.stub
        if method == "Store":
            # The input again, as data of the store that it begins.
            parts = [request, pb.StoreRequest(data=data), request]
            stub.Store(iter(parts[: 2 + len(data) % 2]), timeout=_MOST_S)
        elif method in _STREAMED:
            for _ in getattr(stub, method)(request, timeout=_MOST_S):
                pass
        elif method in _ENDLESS:
            call = getattr(stub, method)(request, timeout=_MOST_S)
            next(call)
            call.cancel()
        else:
            getattr(stub, method)(request, timeout=_MOST_S)

    def check(self) -> None:
        """The good pages are served; they are stored again where evictions took them."""
        ns = self._client.open(SPACE)
        ns.store(_TOKENS, pages_of(NODES, 0, 0, SPACE.page_bytes), timeout_s=_MOST_S)
        out = np.zeros((len(NODES), SPACE.page_bytes), np.uint8)
        loaded = ns.load(_TOKENS, out, timeout_s=_MOST_S)
        check_pages(out[:loaded], NODES[:loaded], 0, 0)

    def close(self) -> None:
        self.check()
        self._client.close()
        self._served.stop()

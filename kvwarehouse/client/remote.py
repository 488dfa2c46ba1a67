"""The data path of a client that shares no memory with the daemon: KV in chunks over gRPC.

Thread-safe as its channel is. What arrives was verified by the daemon before it left; TLS keeps it
so on the way. Loads are cut at whole pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from kvwarehouse.client.channel import Channel
from kvwarehouse.client.path import DataPath, Pinned
from kvwarehouse.client.prefix import Prefix, Window
from kvwarehouse.client.regions import Regions
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.types import Namespace
from kvwarehouse.wire import CHUNK_BYTES, prefix_to_wire
from kvwarehouse.wire import warehouse_pb2 as pb

# Of a load's time, what is kept for the answer to come back before the call is cut.
_ANSWER_SHARE = 0.1
_ANSWER_MOST_S = 0.5


class RemotePath(DataPath):
    shares_memory = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def opened(self, space: Namespace) -> bool:
        return False  # only the daemon knows; it is asked once a namespace

    def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        request = pb.LookupRequest(
            namespace_id=space.id, prefix=prefix_to_wire(prefix.tokens, prefix.keys)
        )
        found = self._channel.call("Lookup", request)
        return found.pages, found.dram_pages, found.nvme_pages

    def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> tuple[int, dict[str, int]]:
        """Waits for promotion and for the transfer together, at most timeout_s; 0: no wait for
        promotion, and the transfer within the client's own timeout."""
        deadline_s = timeout_s or self._channel.timeout_s
        request = pb.LoadRequest(
            namespace_id=space.id,
            prefix=prefix_to_wire(prefix.tokens, prefix.keys),
            first=window.first,
            pages=window.pages,
            shard=window.shard,
            timeout_s=max(0.0, timeout_s - min(timeout_s * _ANSWER_SHARE, _ANSWER_MOST_S)),
        )
        filling = _Filling(out, window.pages)
        try:
            with closing(self._channel.stream("Load", request, deadline_s)) as answers:
                for answer in answers:
                    if answer.WhichOneof("part") == "summary":
                        return filling.finish(answer.summary.pages, dict(answer.summary.missed))
                    filling.add(answer.data)
        except TransportError as error:
            if error.code != "deadline":
                raise
            return filling.cut()
        raise TransportError(
            f"{self._channel.address} ended a load without a summary; is it a kvwarehouse daemon?",
            code="protocol",
        )

    def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> tuple[int, int, dict[str, int]]:
        header = pb.StoreHeader(
            namespace_id=space.id,
            prefix=prefix_to_wire(prefix.tokens, prefix.keys),
            first=window.first,
            pages=window.pages,
            shard=window.shard,
        )

        def requests() -> Iterator[Any]:
            yield pb.StoreRequest(header=header)
            for chunk in _chunks(pages, window.pages):
                yield pb.StoreRequest(data=chunk)

        answer = self._channel.call("Store", requests, timeout_s or self._channel.timeout_s)
        return answer.stored, answer.already, dict(answer.dropped)

    def pin(self, space: Namespace, prefix: Prefix, first: int, timeout_s: float) -> Pinned:
        raise UsageError(
            f"pins hold pages of shared memory, and {self._channel.address} shares none; load them"
            " instead, or connect to the daemon of this host by its unix:// address",
            code="unsupported",
        )

    def close(self) -> None:
        """Nothing of its own: the channel belongs to the client."""


class _Filling:
    """Puts the bytes of a load into whole pages of `out`."""

    def __init__(self, out: Regions, pages: int) -> None:
        self._out = out
        self._pages = pages
        self._page = bytearray(out.page_bytes)
        self._filled = 0
        self._full_pages = 0

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._full_pages == self._pages:
                raise TransportError(
                    f"the daemon sent more than the {self._pages} pages asked for", code="protocol"
                )
            taken = min(len(view), self._out.page_bytes - self._filled)
            self._page[self._filled : self._filled + taken] = view[:taken]
            view = view[taken:]
            self._filled += taken
            if self._filled == self._out.page_bytes:
                self._out.write(self._full_pages, memoryview(self._page))
                self._full_pages += 1
                self._filled = 0

    def finish(self, pages: int, missed: dict[str, int]) -> tuple[int, dict[str, int]]:
        if pages > self._full_pages:
            raise TransportError(
                f"the daemon counts {pages} pages and sent {self._full_pages}", code="protocol"
            )
        return pages, missed

    def cut(self) -> tuple[int, dict[str, int]]:
        """The deadline came before the summary: each whole page was verified before it left."""
        return self._full_pages, {"timeout": self._pages - self._full_pages}


def _chunks(pages: Regions, count: int) -> Iterator[bytes]:
    """The pages' bytes one after another, in pieces of CHUNK_BYTES, small pages together."""
    gathered = bytearray()
    for page in range(count):
        view = pages.read(page)
        for offset in range(0, len(view), CHUNK_BYTES):
            piece = view[offset : offset + CHUNK_BYTES]
            if len(gathered) + len(piece) > CHUNK_BYTES:
                yield bytes(gathered)
                gathered.clear()
            gathered += piece
    if gathered:
        yield bytes(gathered)

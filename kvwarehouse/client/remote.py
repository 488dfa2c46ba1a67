"""The data path of a client that shares no memory with the daemon: KV in chunks over gRPC.

Thread-safe as its channel is. What arrives was verified by the daemon before it left; TLS keeps it
so on the way. Loads are cut at whole pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.channel import Channel, server_wait_s
from kvwarehouse.client.keys import Runs
from kvwarehouse.client.path import DataPath, Pinned
from kvwarehouse.client.prefix import Prefix, Window
from kvwarehouse.client.regions import Regions
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.types import Control, Namespace
from kvwarehouse.wire import CHUNK_BYTES, prefix_to_wire
from kvwarehouse.wire import warehouse_pb2 as pb


class RemotePath(DataPath):
    shares_memory = False
    patient = True

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def opened(self, space: Namespace) -> bool:
        return False  # only the daemon knows; it is asked once a namespace

    def sees(self, space: Namespace) -> bool:
        return False

    def refresh(self, timeout_s: float) -> bool:
        raise self._unsupported("refresh maps new shared memory", "go on, calls reconnect")

    def control(self) -> Control:
        raise self._unsupported("the control page is shared memory", "ask for the status")

    def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        request = pb.LookupRequest(namespace_id=space.id, prefix=self._to_wire(prefix))
        found = self._channel.call("Lookup", request)
        return found.pages, found.dram_pages, found.nvme_pages

    def tiers(self, space: Namespace, prefix: Prefix, *, counted: bool) -> NDArray[np.uint8]:
        raise self._unsupported("tiers are read from shared memory", "look the prompt up instead")

    def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> tuple[int, dict[str, int]]:
        """Waits for promotion and for the transfer together, at most timeout_s; 0: no wait for
        promotion, and the transfer within the client's own timeout."""
        deadline_s = timeout_s or self._channel.timeout_s
        request = pb.LoadRequest(
            namespace_id=space.id,
            prefix=self._to_wire(prefix),
            first=window.first,
            pages=window.pages,
            shard=window.shard,
            timeout_s=server_wait_s(timeout_s),
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
            prefix=self._to_wire(prefix),
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
        raise self._unsupported("pins hold pages of shared memory", "load them instead")

    def close(self) -> None:
        """Nothing of its own: the channel belongs to the client."""

    def _to_wire(self, prefix: Prefix) -> pb.Prefix:
        if isinstance(prefix.keys, Runs):
            raise self._unsupported(
                "KeyRuns are for clients that share memory",
                "pass one prompt's keys from its root",
            )
        return prefix_to_wire(prefix.tokens, prefix.keys)

    def _unsupported(self, what: str, instead: str) -> UsageError:
        return UsageError(
            f"{what}, and {self._channel.address} shares none; {instead}, or connect to the daemon"
            " of this host by its unix:// address",
            code="unsupported",
        )


class _Filling:
    """Puts the bytes of a load into `out`: at once where its pages are one run of memory, else page
    by page. What was written beyond the pages that count holds nothing of meaning."""

    def __init__(self, out: Regions, pages: int) -> None:
        self._out = out
        self._pages = pages
        self._flat = out.flat()
        self._page = bytearray(0 if self._flat is not None else out.page_bytes)
        self._received = 0

    def add(self, data: bytes) -> None:
        end = self._received + len(data)
        if end > self._pages * self._out.page_bytes:
            raise TransportError(
                f"the daemon sent more than the {self._pages} pages asked for", code="protocol"
            )
        if self._flat is not None:
            self._flat[self._received : end] = data
        else:
            self._scatter(memoryview(data))
        self._received = end

    def finish(self, pages: int, missed: dict[str, int]) -> tuple[int, dict[str, int]]:
        if pages > self._whole():
            raise TransportError(
                f"the daemon counts {pages} pages and sent {self._whole()}", code="protocol"
            )
        return pages, missed

    def cut(self) -> tuple[int, dict[str, int]]:
        """The deadline came before the summary: each whole page was verified before it left."""
        return self._whole(), {"timeout": self._pages - self._whole()}

    def _whole(self) -> int:
        return self._received // self._out.page_bytes

    def _scatter(self, view: memoryview) -> None:
        page, place = divmod(self._received, self._out.page_bytes)
        while view:
            taken = min(len(view), self._out.page_bytes - place)
            self._page[place : place + taken] = view[:taken]
            view, place = view[taken:], place + taken
            if place == self._out.page_bytes:
                self._out.write(page, memoryview(self._page))
                page, place = page + 1, 0


def _chunks(pages: Regions, count: int) -> Iterator[bytes]:
    """The pages' bytes one after another, in pieces of CHUNK_BYTES, small pages together."""
    flat = pages.flat()
    if flat is not None:
        for offset in range(0, len(flat), CHUNK_BYTES):
            yield bytes(flat[offset : offset + CHUNK_BYTES])
        return
    gathered = bytearray()
    for page in range(count):
        gathered += pages.read(page)
        while len(gathered) >= CHUNK_BYTES:
            yield bytes(gathered[:CHUNK_BYTES])
            del gathered[:CHUNK_BYTES]
    if gathered:
        yield bytes(gathered)

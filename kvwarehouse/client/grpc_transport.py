"""The data path of a client that shares no memory with the daemon: KV in chunks over gRPC, and what
of it counts. kvwarehouse/aio/grpc_transport.py is its twin.

What arrives was verified by the daemon before it left; TLS keeps it so on the way. Loads are cut at
whole pages. A Filling belongs to one load; all else is thread-safe, as the channel is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.endpoint import Endpoint, server_wait_s
from kvwarehouse.client.prompt import Prefix, Runs, Window
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.rpc import Call, Channel
from kvwarehouse.client.transport import Pinned, Transport
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.types import Control, Namespace
from kvwarehouse.wire import CHUNK_BYTES, prefix_to_wire
from kvwarehouse.wire import warehouse_pb2 as pb

if TYPE_CHECKING:
    from kvwarehouse import core

Loading: TypeAlias = tuple[int, dict[str, int]]
"""Pages filled in order; reasons for the others."""
Storing: TypeAlias = tuple[int, int, dict[str, int]]
"""Pages stored, already there, and dropped by reason."""


class Transfers:
    """The calls of one client that move pages."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def lookup(self, space: Namespace, prefix: Prefix) -> Call[tuple[int, int, int]]:
        request = pb.LookupRequest(namespace_id=space.id, prefix=self._to_wire(prefix))
        return Call("Lookup", request, lambda found: (0, found.dram_pages, found.nvme_pages))

    def load(
        self,
        space: Namespace,
        prefix: Prefix,
        window: Window,
        filling: Filling,
        timeout_s: float,
    ) -> Call[Loading | None]:
        """Its answers are streamed into `filling`, and the last of them is what it came to. Waits
        for promotion and for the transfer together, at most timeout_s; 0: no wait for promotion,
        and the transfer within the client's own timeout."""
        request = pb.LoadRequest(
            namespace_id=space.id,
            prefix=self._to_wire(prefix),
            first=window.first,
            pages=window.pages,
            shard=window.shard,
            timeout_s=server_wait_s(timeout_s),
        )
        return Call("Load", request, filling.take, timeout_s or None)

    def without_summary(self) -> TransportError:
        return TransportError(
            f"{self._endpoint.address} ended a load without a summary; is it a kvwarehouse daemon?",
            code="protocol",
        )

    def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> Call[Storing]:
        """Its request is a function that makes an iterator of them: `pages` are read meanwhile."""
        header = pb.StoreHeader(
            namespace_id=space.id,
            prefix=self._to_wire(prefix),
            first=window.first,
            pages=window.pages,
            shard=window.shard,
        )

        def requests() -> Iterator[pb.StoreRequest]:
            yield pb.StoreRequest(header=header)
            for chunk in chunks(pages, window.pages):
                yield pb.StoreRequest(data=chunk)

        return Call("Store", requests, _stored, timeout_s or None)

    def no_tiers(self) -> UsageError:
        return self._unsupported("tiers are read from shared memory", "look the prompt up instead")

    def no_pins(self) -> UsageError:
        return self._unsupported("pins hold pages of shared memory", "load them instead")

    def no_control(self) -> UsageError:
        return self._unsupported("the control page is shared memory", "ask for the status")

    def no_refresh(self) -> UsageError:
        return self._unsupported("refresh maps new shared memory", "go on, calls reconnect")

    def _to_wire(self, prefix: Prefix) -> pb.Prefix:
        if isinstance(prefix.keys, Runs):
            raise self._unsupported(
                "KeyRuns are for clients that share memory",
                "pass one prompt's keys from its root",
            )
        return prefix_to_wire(prefix.tokens, prefix.keys)

    def _unsupported(self, what: str, instead: str) -> UsageError:
        return UsageError(
            f"{what}, and {self._endpoint.address} shares none; {instead}, or connect to the daemon"
            " of this host by its unix:// address",
            code="unsupported",
        )


def _stored(answer: pb.StoreResponse) -> Storing:
    return answer.stored, answer.already, dict(answer.dropped)


class Filling:
    """Puts the bytes of a load into `out`: at once where its pages are one run of memory, else page
    by page. What was written beyond the pages that count holds nothing of meaning."""

    def __init__(self, out: Regions, pages: int) -> None:
        self._out = out
        self._pages = pages
        self._flat = out.flat()
        self._page = bytearray(0 if self._flat is not None else out.page_bytes)
        self._received = 0

    def take(self, answer: pb.LoadResponse) -> Loading | None:
        """What the load came to, with its last message."""
        if answer.WhichOneof("part") == "summary":
            return self.finish(answer.summary.pages, dict(answer.summary.missed))
        self.add(answer.data)
        return None

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

    def finish(self, pages: int, missed: dict[str, int]) -> Loading:
        if pages > self._whole():
            raise TransportError(
                f"the daemon counts {pages} pages and sent {self._whole()}", code="protocol"
            )
        return pages, missed

    def cut(self) -> Loading:
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


def chunks(pages: Regions, count: int) -> Iterator[bytes]:
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


class Grpc(Transport):
    shares_memory = False
    patient = True

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._transfers = Transfers(channel.endpoint)

    def opened(self, space: Namespace) -> bool:
        return False  # only the daemon knows; it is asked once a namespace

    def sees(self, space: Namespace) -> bool:
        return False

    def refresh(self, timeout_s: float) -> bool:
        raise self._transfers.no_refresh()

    def control(self) -> Control:
        raise self._transfers.no_control()

    def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        return self._channel.ask(self._transfers.lookup(space, prefix))

    def tiers(self, space: Namespace, prefix: Prefix, *, counted: bool) -> NDArray[np.uint8]:
        raise self._transfers.no_tiers()

    def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> Loading:
        filling = Filling(out, window.pages)
        call = self._transfers.load(space, prefix, window, filling, timeout_s)
        try:
            with closing(self._channel.stream(call)) as answers:
                for loading in answers:
                    if loading is not None:
                        return loading
        except TransportError as error:
            if error.code != "deadline":
                raise
            return filling.cut()
        raise self._transfers.without_summary()

    def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> Storing:
        return self._channel.ask(self._transfers.store(space, prefix, window, pages, timeout_s))

    def pin(self, space: Namespace, prefix: Prefix, first: int, timeout_s: float) -> Pinned:
        raise self._transfers.no_pins()

    def tags(self, space: Namespace, prefix: Prefix) -> NDArray[np.uint64]:
        raise self._transfers.no_tiers()

    def hold(
        self, space: Namespace, prefix: Prefix, window: Window, timeout_s: float
    ) -> core.Extents:
        raise self._transfers.no_pins()

    def segments(self, timeout_s: float) -> str:
        return ""

    def use_device(self, ordinal: int) -> None:
        raise self._transfers.no_pins()

    def device_stage(self, ordinal: int, size_bytes: int) -> core.DeviceStage:
        raise self._transfers.no_pins()

    def close(self) -> None:
        """Nothing of its own: the channel belongs to the client."""

"""The transport of a client that shares no memory with the daemon: KV in chunks over gRPC, and what
of it counts. kvwarehouse/aio/grpc_transport.py is its twin.

What arrives was verified by the daemon before it left; TLS keeps it so on the way. Loads are cut at
whole pages. A Filling belongs to one load; all else is thread-safe, as the channel is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvwarehouse.client.endpoint import server_wait_s
from kvwarehouse.client.prompt import Prefix, Runs
from kvwarehouse.client.regions import Regions, refuse_device
from kvwarehouse.client.requests import (
    LoadRequest,
    LookupRequest,
    ReleaseRequest,
    StoreRequest,
)
from kvwarehouse.client.rpc import Call, Channel
from kvwarehouse.client.transport import Transport, unshared
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.types import Loaded, Match, Namespace, StoreResult
from kvwarehouse.wire import CHUNK_BYTES, prefix_to_wire
from kvwarehouse.wire import warehouse_pb2 as pb


class Grpc(Transport):
    patient = True
    shared_memory = None

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls = PageCalls(channel.address)

    def has_namespace(self, space: Namespace) -> bool:
        return False  # only the daemon knows; it is asked once a namespace

    def lookup(self, request: LookupRequest) -> Match:
        return self._channel.ask(self._calls.lookup(request))

    def load(self, request: LoadRequest) -> Loaded:
        filling = Filling(request.out)
        call = self._calls.load(request, filling)
        try:
            with closing(self._channel.stream(call)) as answers:
                for loaded in answers:
                    if loaded is not None:
                        return loaded
        except TransportError as error:
            if error.code != "deadline":
                raise
            return filling.cut()
        raise self._calls.without_summary()

    def store(self, request: StoreRequest) -> StoreResult:
        with self._calls.since_refused(request):
            return self._channel.ask(self._calls.store(request))

    def release(self, request: ReleaseRequest) -> int:
        return self._channel.ask(self._calls.release(request))

    def close(self) -> None:
        """Nothing of its own: the channel belongs to the client."""


class PageCalls:
    """The calls that look up and move pages, for both clients."""

    def __init__(self, address: object) -> None:
        """address: for what errors say."""
        self._address = address

    def lookup(self, request: LookupRequest) -> Call[pb.LookupResponse, Match]:
        asked = pb.LookupRequest(
            namespace_id=request.space.id, prefix=self._to_wire(request.prefix)
        )
        return Call(
            "Lookup",
            asked,
            lambda found: request.match(0, found.dram_pages, found.nvme_pages, found.remote_pages),
        )

    def load(self, request: LoadRequest, filling: Filling) -> Call[pb.LoadResponse, Loaded | None]:
        """Its answers are streamed into `filling`, and the last of them is what it came to. Waits
        for promotion and for the transfer together, at most timeout_s; 0: no wait for promotion,
        and the transfer within the client's own timeout."""
        asked = pb.LoadRequest(
            namespace_id=request.space.id,
            prefix=self._to_wire(request.prefix),
            first=request.first,
            pages=request.out.count,
            shard=request.shard,
            timeout_s=server_wait_s(request.timeout_s),
        )
        return Call("Load", asked, filling.take, request.timeout_s or None)

    def without_summary(self) -> TransportError:
        return TransportError(
            f"{self._address} ended a load without a summary; is it a kvwarehouse daemon?",
            code="protocol",
        )

    def store(self, request: StoreRequest) -> Call[pb.StoreResponse, StoreResult]:
        """Its request is a function that makes an iterator of them: the pages are read
        meanwhile."""
        refuse_device(request.pages)  # what is raised while gRPC takes the requests is not told
        header = pb.StoreHeader(
            namespace_id=request.space.id,
            prefix=self._to_wire(request.prefix),
            first=request.first,
            pages=request.pages.count,
            shard=request.shard,
        )

        def parts() -> Iterator[pb.StoreRequest]:
            if request.since_epoch is None:
                yield pb.StoreRequest(header=header)
            else:
                since = pb.StoreSince(header=header, clear_epoch=request.since_epoch)
                yield pb.StoreRequest(since=since)
            for chunk in chunks(request.pages):
                yield pb.StoreRequest(data=chunk)

        return Call("Store", parts, _stored, request.timeout_s or None)

    def release(self, request: ReleaseRequest) -> Call[pb.ReleaseResponse, int]:
        asked = pb.ReleaseRequest(
            namespace_id=request.space.id,
            prefix=self._to_wire(request.prefix),
            first=request.first,
        )
        return Call("Release", asked, lambda released: int(released.pages))

    @contextmanager
    def since_refused(self, request: StoreRequest) -> Iterator[None]:
        """Says why an older daemon refuses a store with a clear epoch."""
        try:
            yield
        except UsageError as error:
            if request.since_epoch is None or error.code != "no_header":
                raise
            raise UsageError(
                f"the daemon at {self._address} is older than this client, and cannot tell whether"
                " the namespace was cleared since; restart it with this version",
                code="since_unknown",
            ) from error

    def _to_wire(self, prefix: Prefix) -> pb.Prefix:
        if isinstance(prefix.keys, Runs):
            raise unshared(
                self._address,
                "KeyRuns are for clients that share memory",
                "pass one prompt's keys from its root",
            )
        return prefix_to_wire(prefix.tokens, prefix.keys)


def _stored(answer: pb.StoreResponse) -> StoreResult:
    return StoreResult(answer.stored, answer.already, dict(answer.dropped))


class Filling:
    """Puts the bytes of a load into `out`: at once where its pages are one run of memory, else page
    by page. What was written beyond the pages that count holds nothing of meaning."""

    def __init__(self, out: Regions) -> None:
        self._out = out
        self._flat = out.flat()
        self._page = bytearray(0 if self._flat is not None else out.page_bytes)
        self._received = 0

    def take(self, answer: pb.LoadResponse) -> Loaded | None:
        """What the load came to, with its last message."""
        if answer.WhichOneof("part") == "summary":
            return self.finish(answer.summary.pages, dict(answer.summary.missed))
        self.add(answer.data)
        return None

    def add(self, data: bytes) -> None:
        end = self._received + len(data)
        if end > self._out.count * self._out.page_bytes:
            raise TransportError(
                f"the daemon sent more than the {self._out.count} pages asked for", code="protocol"
            )
        if self._flat is not None:
            self._flat[self._received : end] = data
        else:
            self._scatter(memoryview(data))
        self._received = end

    def finish(self, pages: int, missed: dict[str, int]) -> Loaded:
        if pages > self._whole():
            raise TransportError(
                f"the daemon counts {pages} pages and sent {self._whole()}", code="protocol"
            )
        return Loaded(pages, missed)

    def cut(self) -> Loaded:
        """The deadline came before the summary: each whole page was verified before it left."""
        return Loaded(self._whole(), {"timeout": self._out.count - self._whole()})

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


def chunks(pages: Regions) -> Iterator[bytes]:
    """The pages' bytes one after another, in pieces of CHUNK_BYTES, small pages together."""
    flat = pages.flat()
    if flat is not None:
        for offset in range(0, len(flat), CHUNK_BYTES):
            yield bytes(flat[offset : offset + CHUNK_BYTES])
        return
    gathered = bytearray()
    for page in range(pages.count):
        gathered += pages.read(page)
        while len(gathered) >= CHUNK_BYTES:
            yield bytes(gathered[:CHUNK_BYTES])
            del gathered[:CHUNK_BYTES]
    if gathered:
        yield bytes(gathered)

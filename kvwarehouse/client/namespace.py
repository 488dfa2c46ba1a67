"""A namespace opened at a daemon: lookup, load, store, pin.

Thread-safe. kvwarehouse/aio/namespace.py is its twin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client import admin
from kvwarehouse.client.pins import Pins
from kvwarehouse.client.prompt import Keys, prefix_of
from kvwarehouse.client.requests import (
    LoadRequest,
    LookupRequest,
    PinRequest,
    ReleaseRequest,
    StoreRequest,
    TiersRequest,
)
from kvwarehouse.client.rpc import Channel
from kvwarehouse.client.transport import Transport, no_pins, no_tiers, not_visible
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Loaded, Match, Namespace, StoreResult

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")

UNKNOWN_NAMESPACE: Final = ("unknown_namespace", "namespace_unknown")
"""What the service and what the core call it."""


class OpenNamespace:
    """Made by `client.open`. A prompt is given as `tokens` (ids, any integer sequence or array, at
    most 1,048,576) or, by engines that hash their own blocks, as `keys` (1 to 64 bytes a page, each
    chaining the ones before it). Only whole pages count.

    keys may also be a list of KeyRun: parts of several prompts in one call, in the order given.
    lookup, load and pin then go on until the first page that is missing, over the ends of runs; a
    store goes on with the other runs. `first` is then 0. Over gRPC: UsageError "unsupported"."""

    def __init__(
        self, space: Namespace, channel: Channel, transport: Transport, *, reopen: bool
    ) -> None:
        """reopen: registers it again at a daemon that does not know it."""
        self.space = space
        self._channel = channel
        self._transport = transport
        self._reopen = reopen

    def lookup(self, tokens: Any = None, *, keys: Keys | None = None) -> Match:
        """The longest stored prefix of the prompt, and what the remote store probably has behind
        it: whole objects, of up to 256 tokens each. Reads shared memory, no call to a local daemon.

        Promises nothing: what matches now can be evicted before it is loaded, and is then a miss.
        Raises UsageError on bad input; over gRPC, TransportError."""
        request = LookupRequest.checked(self.space, tokens, keys)
        if not request.prefix.pages:
            return request.missed()
        return self._call(self._transport.lookup, request, request.missed)

    def tiers(
        self, tokens: Any = None, *, keys: Keys | None = None, counted: bool = True
    ) -> NDArray[np.uint8]:
        """Where each page is now, as Tier numbers: 0 missing, 1 DRAM, 2 NVMe, 4 probably in the
        remote store. Ends at the first gap of the prompt, or of each run of keys: pages behind it
        are 0 too, and pages that stand alone are each seen by themselves.

        Reads shared memory, as lookup does, and counts as one, unless counted=False (for who asks
        what to store, not what to load); makes no call, touches no page.

        Raises UsageError on bad input, and (code "unsupported") on a remote client."""
        request = TiersRequest(self.space, prefix_of(self.space, tokens, keys), counted)
        return tiers_of(self, request)

    def load(
        self,
        tokens: Any = None,
        out: Any = None,
        shard: int = 0,
        timeout_s: float = 5.0,
        *,
        keys: Keys | None = None,
        first: int = 0,
    ) -> Loaded:
        """Fills `out` with one shard of the longest stored prefix, from page `first` on.

        out: uint8 (k, page_bytes), C-contiguous and writable, or Regions of k pages; at most k
        pages are loaded. What it waits for on a GPU: see Regions.on_device. Each page is verified;
        one that fails is a miss, and the load ends before it. Waits for pages on NVMe until they
        are promoted, and for those of the remote store until they are fetched, at most timeout_s;
        0: loads what is in DRAM. With a local daemon the copy from DRAM is not cut; over gRPC the
        transfer counts. A load cut by its time keeps what arrived in order.

        Returns the pages filled, an int with `.missed`: reasons for the others. Rows of `out` from
        there on hold nothing of meaning. Of the remote store: "remote_missing" (it does not have
        them after all), "remote_damaged", "remote_failed", "remote_off" (it is not read now),
        "no_room" (here). Raises UsageError on bad input, TransportError where a
        remote daemon is gone."""
        request = LoadRequest.checked(self.space, tokens, keys, out, first, shard, timeout_s)
        if not request.out.count:
            return request.missed()
        return self._call(self._transport.load, request, request.missed)

    def store(  # noqa: PLR0913  each may be left out
        self,
        tokens: Any = None,
        pages: Any = None,
        shard: int = 0,
        *,
        keys: Keys | None = None,
        first: int = 0,
        timeout_s: float = 5.0,
        since_epoch: int | None = None,
    ) -> StoreResult:
        """Stores one shard of every whole page of the prompt, from page `first` on.

        pages: uint8 (n, page_bytes), C-contiguous, or Regions of n pages, where n is the whole
        pages of the prompt less `first`. Read until the call returns; what it waits for on a GPU:
        see Regions.on_device. A page can be loaded by anyone once all its shards are stored. Blocks
        for the copy and one or two short calls, at most timeout_s.

        since_epoch: the `clear_epoch` that a listing had for the namespace when the pages were
        taken from wherever they come from; if it was cleared after that, none of them is stored,
        and they are dropped as "cleared". None: they are as new as this call.

        Returns what was stored, was there already, and was dropped by reason (the warehouse is
        full, draining, ...): dropping is not an error, and ends its own run of keys only. Raises
        UsageError on bad input, and (code "since_unknown") where the daemon is too old for
        since_epoch; TransportError when there is no daemon; nothing half-stored is ever visible."""
        request = StoreRequest.checked(
            self.space, tokens, keys, pages, first, shard, timeout_s, since_epoch
        )
        if not request.pages.count:
            return StoreResult(0, 0, {})
        return self._call(self._transport.store, request)

    def pin(
        self,
        tokens: Any = None,
        *,
        keys: Keys | None = None,
        first: int = 0,
        timeout_s: float = 0.0,
    ) -> Pins:
        """Holds the longest stored prefix from page `first` in DRAM, so that work queued on a
        device may read it. Pages on NVMe are promoted first, and those of the remote store fetched,
        as far as timeout_s reaches.

        Returns Pins (0 pages where nothing matched). Raises PinError over the budget of pins, and
        UsageError (code "unsupported") on a remote client, which shares no memory."""
        request = PinRequest.checked(self.space, tokens, keys, first, timeout_s)
        memory = self._transport.shared_memory
        if memory is None:
            raise no_pins(self._channel.address)
        return self._call(memory.pin, request, request.missed)

    def release(self, tokens: Any = None, *, keys: Keys | None = None, first: int = 0) -> int:
        """Says that the stored pages of the prompt, from page `first` on, are needed no more: a
        conversation is over, a branch of an agent was given up. They leave their tiers before all
        that were not released, as soon as there is no room for others; until then they are found as
        before, and one that is used again is as any other.

        Pages that somebody has stored others behind stay as they are, and so do those before them:
        what prompts share is released with the last of them. Call it once the prompt's stores have
        returned.

        A hint: it writes to shared memory, waits for nobody, and is lost where the daemon has not
        listened lately. Returns of how many pages it spoke, at most 4,096: of a longer prompt those
        at its end. Raises UsageError on bad input; over gRPC, TransportError."""
        request = ReleaseRequest.checked(self.space, tokens, keys, first)
        if request.first == request.prefix.pages:
            return request.missed()
        return self._call(self._transport.release, request, request.missed)

    def _call(
        self,
        call: Callable[[_Request], _Answer],
        request: _Request,
        missed: Callable[[], _Answer] | None = None,
    ) -> _Answer:
        """Makes `call`, once more if the daemon does not know the namespace: another one, or one
        whose ledger was lost, took its place since. Registering is a call: a client without
        patience has `missed` instead, where there is such a thing."""
        try:
            return call(request)
        except UsageError as error:
            if error.code not in UNKNOWN_NAMESPACE or not self._reopen:
                raise
        if missed is not None and not self._transport.patient:
            return missed()
        register(self._channel, self._transport, self.space)
        return call(request)


class ReopenedNamespaces:
    """Those that refresh registers at a new daemon: which somebody holds open, of any client, and
    which were not forgotten since. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: WeakSet[admin.Opened] = WeakSet()

    def add(self, opened: admin.Opened) -> None:
        with self._lock:
            self._opened.add(opened)

    def forget(self, space: admin.Named | admin.Opened | None) -> None:
        """None: all of them."""
        meant = None if space is None else admin.namespace_id(space)
        with self._lock:
            for opened in list(self._opened):
                if meant in (None, opened.space.id):
                    self._opened.discard(opened)

    def spaces(self) -> list[Namespace]:
        """Each once."""
        with self._lock:
            return list({opened.space.id: opened.space for opened in self._opened}.values())


def tiers_of(opened: OpenNamespace, request: TiersRequest) -> NDArray[np.uint8]:
    """OpenNamespace.tiers, with arguments that are checked already."""
    memory = opened._transport.shared_memory
    if memory is None:
        raise no_tiers(opened._channel.address)
    return opened._call(memory.tiers, request, request.missed)


def open_namespace(channel: Channel, transport: Transport, space: Namespace) -> None:
    """Makes sure that the daemon knows `space`."""
    check_namespace(space)
    if not transport.has_namespace(space):
        register(channel, transport, space)


def check_namespace(space: object) -> None:
    if not isinstance(space, Namespace):
        raise UsageError(
            f"open takes a kvwarehouse.Namespace, not a {type(space).__name__}",
            code="bad_namespace",
        )


def register(channel: Channel, transport: Transport, space: Namespace) -> None:
    """Tells the daemon of `space`, whose memory must show it then."""
    channel.ask(admin.open_namespace(space, channel.address))
    memory = transport.shared_memory
    if memory is not None and not memory.has_namespace(space):
        raise not_visible(channel.address)

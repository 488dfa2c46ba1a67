"""A connected client: opens namespaces, and asks the daemon to do things.

Thread-safe. After a fork the child must connect anew. kvwarehouse/aio/client.py is its twin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

from kvwarehouse.client import admin
from kvwarehouse.client.admin import Named, StoredNamespace, StoredPage
from kvwarehouse.client.endpoint import checked_timeout, closed
from kvwarehouse.client.keeps import Keep, ListedKeeps, keep, keeps, remove_all_keeps, remove_keep
from kvwarehouse.client.namespace import OpenNamespace, ReopenedNamespaces, open_namespace
from kvwarehouse.client.prompt import Keys
from kvwarehouse.client.rpc import Channel
from kvwarehouse.client.transport import Transport, no_control, no_refresh
from kvwarehouse.client.watch import Changes, watch
from kvwarehouse.client.why import (
    NotedRequest,
    WhyAnswer,
    note_requests,
    requests,
    why,
)
from kvwarehouse.errors import TransportError, WarehouseError
from kvwarehouse.miss_ratio import MissRatio
from kvwarehouse.types import (
    CheckProgress,
    ClearedPages,
    Control,
    FlushResult,
    Namespace,
    RequestNote,
)


class Client:
    """Made by `kvwarehouse.connect` or `kvwarehouse.embedded`; also a context manager."""

    def __init__(self, channel: Channel, transport: Transport) -> None:
        self._channel = channel
        self._transport = transport
        self._lock = threading.Lock()
        self._closed = False
        self._reopened = ReopenedNamespaces()

    @property
    def address(self) -> str:
        return str(self._channel.address)

    @property
    def local(self) -> bool:
        """Whether pages move through shared memory, with pins."""
        return self._transport.shared_memory is not None

    def open(self, space: Namespace, *, reopen: bool = True) -> OpenNamespace:
        """`space`, ready for lookup, load and store; the daemon registers it if it is new.

        A daemon that took another's place without its ledger does not know `space` any more. It is
        registered anew by the next call that needs it, or by refresh for as long as what is
        returned is held; with reopen=False by neither: those calls raise UsageError (code
        "namespace_unknown"), and the caller opens it again.

        Raises UsageError where its pages fit no slab of this daemon, TransportError without one."""
        self._check_open()
        open_namespace(self._channel, self._transport, space)
        opened = OpenNamespace(space, self._channel, self._transport, reopen=reopen)
        if reopen:
            self._reopened.add(opened)
        return opened

    def refresh(self, timeout_s: float = 1.0) -> bool:
        """Finds the daemon again if it was replaced: maps its memory and registers the namespaces
        that are held open (see `open`) and that it does not know. Quick where nothing changed. For
        clients without patience, from a thread that may wait: at most timeout_s, while lookups of
        other threads go on.

        Returns whether the client is connected to the daemon that is there now; False where none
        answers in time. While another thread's call waits for the daemon it is True at once, and
        that call finds out. Raises UsageError (code "unsupported") on a remote client; and what the
        daemon refuses a namespace with, once the others are registered."""
        self._check_open()
        timeout_s = checked_timeout(timeout_s)
        memory = self._transport.shared_memory
        if memory is None:
            raise no_refresh(self._channel.address)
        end_s = time.monotonic() + timeout_s
        if not memory.refresh(timeout_s):
            return False
        refused: WarehouseError | None = None
        for space in self._reopened.spaces():
            if memory.sees_namespace(space):
                continue
            left_s = max(0.0, end_s - time.monotonic())
            try:
                self._channel.ask(admin.open_namespace(space, self._channel.address, left_s))
            except TransportError:
                return False
            except WarehouseError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return True

    def control(self) -> Control:
        """What the daemon publishes about itself: rates, queues, limits, a heartbeat. Reads shared
        memory, no call. Raises UsageError (code "unsupported") on a remote client."""
        self._check_open()
        memory = self._transport.shared_memory
        if memory is None:
            raise no_control(self._channel.address)
        return memory.control()

    def status(self) -> dict[str, Any]:
        """One snapshot of the warehouse: nested dicts of plain values, as
        proto/kvwarehouse/v1/status.proto names them."""
        return self._channel.ask(admin.status())

    def flush(self, timeout_s: float = 30.0) -> FlushResult:
        """Waits until what was stored before the call is durable on NVMe, at most timeout_s. Says
        how many pages are, were not admitted, or are pending still."""
        return self._channel.ask(admin.flush(timeout_s))

    def clear(
        self,
        space: Named | OpenNamespace | None = None,
        *,
        all: bool = False,
        forget: bool = False,
    ) -> ClearedPages:
        """Removes every page of `space`, or with all=True of all namespaces, from all tiers: no
        restart brings them back. Erases nothing: their bytes stay in memory and on disk until
        others are written there. Returns the pages removed, and in `.remote` whether the hosts of a
        fleet follow (ClearedPages). Raises UsageError (code
        "no_target") without the one and the other, or with both.

        forget: the namespace is no more either (of all: those that nobody stores into or watches),
        until somebody opens it again, or stores into it; refresh does not bring it back. A
        warehouse has 4,096 of them, and gives the place of one that is empty to a new one by
        itself. Raises CapacityError (code "namespace_in_use") where `space` was cleared and is in
        use."""
        cleared = self._channel.ask(admin.clear(space, everything=all, forget=forget))
        if forget:
            self._reopened.forget(space)
        return cleared

    def evict(self, space: Named | OpenNamespace | None, pages: int, tiers: str = "dram") -> int:
        """Takes the coldest `pages` pages (at most 100,000) of `space` (None: of all) out of
        "dram", "nvme" or "all" tiers; of "hbm", copies alone leave. Returns how many were."""
        return self._channel.ask(admin.evict(space, pages, tiers))

    def drain(self, timeout_s: float = 30.0) -> FlushResult:
        """Makes the daemon refuse stores until it ends, or undrain, and flushes. Loads go on."""
        return self._channel.ask(admin.drain(timeout_s))

    def undrain(self) -> bool:
        """Takes a drain back, whoever asked for it: stores are taken again. Returns whether the
        daemon drained; of one that did not nothing is changed. Raises CapacityError (code "ending")
        where it drains because it ends."""
        return self._channel.ask(admin.undrain())

    def sweep(self) -> int:
        """Drops pages whose ancestors are in no tier. Returns how many."""
        return self._channel.ask(admin.sweep())

    def namespaces(self) -> list[StoredNamespace]:
        """The namespaces that the warehouse keeps. Salts are not told, but digests of them; clear,
        evict, pages, watch, check and miss_ratio take one of these, or its id, as it is."""
        known: list[StoredNamespace] = []
        after, further = -1, 0
        while further > after:
            after = further
            listed, further = self._channel.ask(admin.namespaces(after))
            known += listed
        return known

    def pages(self, space: Named | OpenNamespace) -> Iterator[StoredPage]:
        """The pages of a namespace, in all tiers, in the order of the index."""
        after, further = -1, 0
        while further > after:
            after = further
            listed, further = self._channel.ask(admin.pages(space, after))
            yield from listed

    def watch(self, space: Named | OpenNamespace | None = None) -> Iterator[Changes]:
        """What enters and leaves the tiers, of `space` (None: of all namespaces): all that is
        stored, then every change as it happens, a message every few seconds at least. Blocks
        between them; closing the iterator ends it, and so does a day. Raises CapacityError: code
        "watcher_too_slow" when this reader lags too far behind, "too_many_watchers" at the
        daemon's bound; TransportError when the daemon ends, or is not heard of for half a minute.
        After any of them, watch again."""
        self._check_open()
        return self._channel.stream(watch(space))

    def miss_ratio(self, space: Named | OpenNamespace | None = None) -> MissRatio:
        """What tiers of other sizes would have hit, of `space` (None: of all)."""
        return self._channel.ask(admin.miss_ratio(space))

    def why(
        self,
        tokens: Any = None,
        *,
        keys: Sequence[bytes] | None = None,
        space: Named | OpenNamespace | None = None,
        model: str = "",
        with_tokens: bool = False,
    ) -> WhyAnswer:
        """Why the pages of a prompt are there or not: where each is, or when and why it left or was
        not stored, and from which token on other prompts go on differently. It is given by its
        tokens, or by the engine's keys, one a page, and looked for in `space`; else in the
        namespaces without a salt of that model, or in all of them, of which the answer has those
        with the longest stored prefix. with_tokens: also the tokens that are stored where the
        prompt parts from the others.

        What left is remembered in memory within a bound, and not over a restart of the daemon.
        Counts as no lookup, and is no use of a page. Raises UsageError: code "bad_prefix" for a
        prompt that is none, or of the other kind than the namespace's; "namespace_unknown"."""
        return self._channel.ask(why(tokens, keys, space, model, with_tokens=with_tokens))

    def keep(
        self,
        space: Named | OpenNamespace,
        tokens: Any = None,
        *,
        ttl_s: float,
        keys: Keys | None = None,
        name: str = "",
        renewed: bool = False,
    ) -> Keep:
        """Has what is stored of a prompt stay in DRAM and NVMe for ttl_s seconds, 366 days at most,
        whatever is asked for meanwhile; what is on NVMe alone is brought to DRAM, as far as that
        goes within two seconds. The prompt is given by its tokens, or by the engine's keys, one a
        page from its first on, or, where pages stand alone as those of windows and states, a KeyRun
        each. What is stored of it later is not kept: call it once the stores have returned. Prompts
        that begin alike hold what they share once.

        name: to remove it by, printable, at most 256 bytes; else one is chosen. A keep of the same
        name and namespace gives way. renewed: each use of the last page that is kept begins the
        time anew.

        A clear, an evict and damage take kept pages all the same. A restart keeps them, once the
        keep is some seconds old. Keep.pages is 0 where nothing of the prompt is stored. Raises
        CapacityError (code "keeps_full") where the daemon has no room for all of it: --keep-percent
        of DRAM, 4,096 keeps; then nothing of it is kept. UsageError (code "bad_keep", "bad_prefix",
        "bad_run", "namespace_unknown")."""
        call = keep(space, tokens, keys, ttl_s=ttl_s, name=name, renewed=renewed)
        return self._channel.ask(call)

    def keeps(self) -> ListedKeeps:
        """The prompts that are kept, those that end first, first."""
        return self._channel.ask(keeps())

    def remove_keep(self, name: str, space: Named | OpenNamespace | None = None) -> int:
        """Ends the keep of that name, in `space` (None: in all namespaces): its pages are as all
        others again. Returns how many there were."""
        return self._channel.ask(remove_keep(name, space))

    def remove_all_keeps(self, space: Named | OpenNamespace | None = None) -> int:
        """Ends all keeps of `space` (None: of all namespaces). Returns how many there were."""
        return self._channel.ask(remove_all_keeps(space))

    def note_requests(self, notes: Sequence[RequestNote]) -> None:
        """Tells the daemon what was found for requests of an engine, 256 at most, so that
        `kvwarehouse why --request ID` can say it later. The newest 4,096 requests are kept, in
        memory. For connectors, from a thread that may wait. Raises UsageError (code "bad_note")
        beyond a bound."""
        self._channel.ask(note_requests(notes))

    def requests(self, request_id: str = "", *, limit: int = 1000) -> list[NotedRequest]:
        """What was noted of the request of that id, by each engine; else of those whose id begins
        so. The newest first, `limit` at most, and as many as fit a message."""
        return self._channel.ask(requests(request_id, limit))

    def check(
        self, space: Named | OpenNamespace | None = None, *, repair: bool = False
    ) -> Iterator[CheckProgress]:
        """Verifies stored pages of `space` (None: of all) in both tiers; `repair` quarantines what
        is bad, in its tier alone. Yields totals so far, the last with done=True."""
        return self._channel.stream(admin.check(space, repair=repair))

    def close(self) -> None:
        """Ends the client: calls under way fail. Pins that somebody still holds stay until they are
        released, since a device may read what they hold. More than once is once, and nothing in a
        forked child."""
        if self._channel.endpoint.forked:
            return
        with self._lock:
            already, self._closed = self._closed, True
        if not already:
            self._transport.close()
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise closed()

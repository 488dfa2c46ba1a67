"""KV events over ZeroMQ, as vLLM publishes them: a PUB socket with what enters and leaves the
tiers, and a ROUTER socket that says again what a subscriber missed.

A message is [topic, sequence number (8 bytes, big-endian), batch]. Numbers rise by one, also over
restarts of the daemon (they begin with the wall clock's microseconds), because a subscriber passes
over numbers that are not above its last. A stream begins with AllBlocksCleared and all that is
stored; so does every restart, and what follows a loss or an error. An idle stream says its last
message again, number and batch: one who joined late, or missed more, notices, and one who missed
that alone, to whom its number is the next, has it then.

A request for replay is [(empty), number]; the answer is [(empty), number, batch] for each batch
from there on, and ends with number -1 and an empty batch. What is not buffered any more is said
anew: AllBlocksCleared and all that is stored, under the number that the stream had when that began.

One stream is one namespace: a router's entry has one model and one block size. It is the one that
`kv_events_namespace` names (a model or an id), else the one that was registered last; pages that
were stored by keys alone have no tokens and are not in it.

Threads of its own for each socket; a subscriber that does not read loses messages, and nobody waits
for it. Nobody is authenticated: over TCP a gate bounds what peers may say and hold; an ipc:// file
is reached by this user and root alone.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import zmq

from kvwarehouse.daemon import directories
from kvwarehouse.daemon.event_batch import (
    EventBatch,
    EventBatches,
    ReplayBuffer,
    cleared_batch,
    empty_batch,
)
from kvwarehouse.daemon.gate import Gate
from kvwarehouse.daemon.ipc_file import IpcFile
from kvwarehouse.daemon.ledger import NamespaceRecord
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.errors import TransportError, WarehouseError
from kvwarehouse.types import CHAIN_SCHEME
from kvwarehouse.wire import status_pb2

if TYPE_CHECKING:
    from kvwarehouse.config import Config
    from kvwarehouse.daemon.warehouse import DaemonWarehouse

PACE_S: Final = 0.01
"""Between batches: what happens in this time travels together."""

IDLE_S: Final = 2.0
"""After this long without a batch, the last one is said again."""

REPLAY_S: Final = 60.0
"""How long one subscriber may take to be told what it missed; others wait meanwhile."""

QUEUED_MESSAGES: Final = 256
"""Of one subscriber that reads slowly, beyond which it loses some; a message has at most some 200
KiB, which the subscribers share."""

QUEUED_ANSWERS: Final = 16
"""Of one subscriber that asked what it missed, beyond which it is waited for."""

_WAIT_S: Final = 0.2
_SEND_S: Final = 5.0
_HEARD_BYTES: Final = 4 << 10  # a request has 8 bytes, a subscription has a topic
_GREETING_MS: Final = 5000
_END: Final = struct.pack(">q", -1)
_NUMBER: Final = struct.Struct(">Q")


class EventStream:
    def __init__(self, config: Config, warehouse: DaemonWarehouse, log: Log) -> None:
        """Binds. Raises TransportError (code "address_unavailable")."""
        self._warehouse = warehouse
        self._log = log
        self._wanted = config.kv_events_namespace
        self._topic = config.kv_events_topic.encode("utf-8")
        self._buffer = ReplayBuffer(config.kv_events_buffer_bytes, time.time_ns() // 1000)
        self._last = empty_batch()  # of the PUB socket's thread: what was said last
        self._stopping = threading.Event()
        self._chosen: NamespaceRecord | None = None
        self._changed = threading.Lock()  # guards _chosen, _feed and _counts
        self._feed: Any = None
        self._counts = status_pb2.KvEventsStatus()
        self._context = zmq.Context()
        self._gates: list[Gate] = []
        self._prepare = partial(directories.prepare_for_socket, config.socket)
        try:
            self._publisher, self._publisher_file = self._bound(
                zmq.PUB, QUEUED_MESSAGES, config.kv_events, config.socket + ".kve"
            )
            self._router: Any = None
            self._router_file: IpcFile | None = None
            if config.kv_events_replay:
                inner = config.socket + ".kvr"
                self._router, self._router_file = self._bound(
                    zmq.ROUTER, QUEUED_ANSWERS, config.kv_events_replay, inner
                )
        except TransportError:
            self._close()
            raise
        self._threads = [threading.Thread(target=self._publish_all, name="kv-events", daemon=True)]
        if self._router is not None:
            self._threads.append(
                threading.Thread(target=self._replay_all, name="kv-events-replay", daemon=True)
            )

    def start(self) -> None:
        # Numbers do not tell which came last: those of forgotten namespaces go to others.
        for record in sorted(self._warehouse.namespaces(), key=lambda each: each.created_at_ns):
            self.follow(record)
        self._warehouse.listen(self.follow)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """What is stored is not taken back: it is there again when the next daemon says so."""
        self._stopping.set()
        with self._changed:
            if self._feed is not None:
                self._feed.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._close()

    def _close(self) -> None:
        for gate in self._gates:
            gate.close()
        self._context.destroy(linger=0)

    def follow(self, record: NamespaceRecord) -> None:
        """A namespace is there. The stream goes over to it, if it is one that is wanted."""
        space = record.space
        if self._wanted:
            wanted = self._wanted in (space.model, space.id.hex())
        else:
            wanted = not (space.salt or space.adapter)
        if not wanted:
            return
        if space.hash_scheme != CHAIN_SCHEME:
            if self._wanted:
                self._log.event(
                    Event.KV_EVENTS_WITHOUT_TOKENS,
                    namespace_id=space.id.hex(),
                    hash_scheme=space.hash_scheme,
                )
            return
        with self._changed:
            self._chosen, old = record, self._feed
            self._feed = None
        if old is not None:
            old.close()

    def status(self) -> status_pb2.KvEventsStatus:
        status = status_pb2.KvEventsStatus(
            ended_peers=sum(gate.ended for gate in self._gates), next_number=self._buffer.next
        )
        with self._changed:
            status.MergeFrom(self._counts)
            status.namespace_id = self._chosen.space.id.hex() if self._chosen else ""
        return status

    @property
    def unreachable(self) -> str:
        """Why new subscribers do not get in, "" where they do."""
        files = (self._publisher_file, self._router_file)
        return "; ".join(file.problem for file in files if file is not None and file.problem)

    def _bound(self, kind: int, queued: int, endpoint: str, inner: str) -> tuple[Any, IpcFile]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, queued)
        made.setsockopt(zmq.MAXMSGSIZE, _HEARD_BYTES)
        made.setsockopt(zmq.HANDSHAKE_IVL, _GREETING_MS)
        address = endpoint.removeprefix("tcp://")
        if address == endpoint:
            file = IpcFile(endpoint.removeprefix("ipc://"), lambda: None, self._log)
        else:
            file = IpcFile(inner, self._prepare, self._log)
        try:
            file.bind(made)
            if address != endpoint:
                self._gates.append(Gate(address, inner))
        except (OSError, zmq.ZMQError) as error:
            raise TransportError(
                f"cannot publish KV events at {endpoint}: {error}; is the address this host's, "
                "and is the port free?",
                code="address_unavailable",
                retryable=False,
                context={"address": endpoint},
            ) from error
        return made, file

    def _count(self, **by: int) -> None:
        """By fields of KvEventsStatus."""
        with self._changed:
            for name, count in by.items():
                setattr(self._counts, name, getattr(self._counts, name) + count)

    # --- the PUB socket's thread

    def _publish_all(self) -> None:
        said_at = time.monotonic()
        while not self._stopping.is_set():
            self._publisher_file.look(self._publisher)
            try:
                published = self._publish_some()
            except WarehouseError as error:
                # A core that does not answer, or has no room for another watcher: again, later.
                self._log.event(Event.CORE_UNRESPONSIVE, code=error.code, text=error.message)
                self._begin_anew()
                self._stopping.wait(IDLE_S)
                continue
            except Exception as error:  # noqa: BLE001  the edge of a thread: the stream goes on
                self._log.event(Event.KV_EVENTS_FAILED, error=repr(error))
                self._begin_anew()
                self._stopping.wait(IDLE_S)
                continue
            now = time.monotonic()
            if published:
                said_at = now
                self._stopping.wait(PACE_S)
            elif now - said_at > IDLE_S:
                said_at = now
                self._send(self._buffer.next - 1, self._last)

    def _begin_anew(self) -> None:
        """What was taken from the feed, and not said, would be missing for good: the next feed
        begins with all that is stored."""
        with self._changed:
            feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def _publish_some(self) -> bool:
        with self._changed:
            feed, record = self._feed, self._chosen
        if record is None:
            self._stopping.wait(_WAIT_S)
            return False
        if feed is None:
            feed = self._warehouse.watch(record, tokens_only=True)
            with self._changed:
                if self._chosen is not record or self._stopping.is_set():
                    feed.close()
                    return False
                self._feed = feed
            self._log.event(
                Event.KV_EVENTS_FOLLOW,
                namespace_id=record.space.id.hex(),
                model=record.space.model,
                page_tokens=record.space.page_tokens,
            )
        taken = feed.take(_WAIT_S)
        if taken["lost"]:
            self._count(losses=1)
            self._log.event(Event.KV_EVENTS_LOST)
            feed.restart()
            return False
        batches = EventBatches(record.space.page_tokens, record.space.adapter)
        published = False
        for batch in batches.of(taken["items"]):
            self._publish(batch)
            published = True
        return published

    def _publish(self, batch: EventBatch) -> None:
        self._count(batches=1, stored=batch.stored, removed=batch.removed)
        self._last = batch.payload
        self._send(self._buffer.add(batch), batch.payload)

    def _send(self, number: int, payload: bytes) -> None:
        self._publisher.send_multipart([self._topic, _NUMBER.pack(number), payload])

    # --- the ROUTER socket's thread

    def _replay_all(self) -> None:
        self._router.setsockopt(zmq.RCVTIMEO, int(_WAIT_S * 1000))
        self._router.setsockopt(zmq.SNDTIMEO, int(_SEND_S * 1000))
        # Who does not read is told nothing more, rather than a part of it.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        assert self._router_file is not None
        while not self._stopping.is_set():
            self._router_file.look(self._router)
            try:
                frames = self._router.recv_multipart()
            except zmq.Again:
                continue
            if len(frames) != 3 or frames[1] or len(frames[2]) != _NUMBER.size:
                self._count(failed_replays=1)
                continue
            try:
                anew = self._replay(frames[0], _NUMBER.unpack(frames[2])[0])
                self._count(replays=1, snapshots=int(anew))
            except Exception as error:  # noqa: BLE001  the edge of a thread: others may ask
                self._count(failed_replays=1)
                self._log.event(Event.KV_EVENTS_REPLAY_FAILED, reason=repr(error))

    def _replay(self, peer: bytes, number: int) -> bool:
        """Whether all was said anew, because the buffer has not got what was asked for."""
        until = time.monotonic() + REPLAY_S
        entries = self._buffer.since(number)
        anew = entries is None
        if entries is None:
            # What is published from here on comes after it, and may say some of it again.
            behind = self._buffer.next
            for batch in self._snapshot(until):
                self._answer(peer, behind - 1, batch, until)
            entries = self._buffer.since(behind) or []
        for at, batch in entries:
            self._answer(peer, at, batch, until)
        self._router.send_multipart([peer, b"", _END, b""])
        return anew

    def _answer(self, peer: bytes, number: int, batch: EventBatch, until: float) -> None:
        self._check_time(until)
        self._router.send_multipart([peer, b"", _NUMBER.pack(number), batch.payload])

    def _check_time(self, until: float) -> None:
        if time.monotonic() > until or self._stopping.is_set():
            raise TransportError(
                f"what a subscriber missed was not said within {REPLAY_S:.0f} s: it reads too "
                "slowly, or too much is stored; it may ask again",
                code="deadline",
            )

    def _snapshot(self, until: float) -> Iterator[EventBatch]:
        """All that is stored, from AllBlocksCleared on."""
        with self._changed:
            record = self._chosen
        if record is None:
            yield cleared_batch()
            return
        batches = EventBatches(record.space.page_tokens, record.space.adapter)
        feed = self._warehouse.watch(record, tokens_only=True)
        try:
            synced = False
            while not synced:
                taken = feed.take(_WAIT_S)
                self._check_time(until)
                if taken["lost"] or taken["closed"]:
                    raise TransportError(
                        "a subscriber read too slowly what is said anew; it may ask again",
                        code="watcher_too_slow",
                    )
                synced = any(item[0] == "synced" for item in taken["items"])
                yield from batches.of(taken["items"])
        finally:
            feed.close()

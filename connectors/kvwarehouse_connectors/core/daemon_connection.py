"""A connection to the daemon that is kept up behind an engine's back.

An engine starts before the daemon, outlives it, and must never wait for it. So one thread connects,
notices a daemon that was replaced, and registers namespaces; everybody else asks what there is now
and goes on without where there is nothing.

Thread-safe. Only `close` blocks, for the thread's last call: at most its timeout.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import kvwarehouse as kvw

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# How long a daemon that does not answer holds this thread; nobody else waits for it.
_CALL_TIMEOUT_S = 2.0
_UNKNOWN = ("namespace_unknown", "unknown_namespace")
# A heartbeat older than this, found by so many looks in a row: the daemon is stopped. It beats
# every 0.1 s. The looks are this process's own turns on the processor: where they are late, the
# daemon's are too, and its silence says nothing yet. On busy cores both were seen to wait 2.5 s.
_STALLED_S = 1.0
_STALLED_LOOKS = 4


# Notes of requests that wait to be told, and how many go in a call.
_MOST_NOTES = 1024
_NOTES_PER_LOOK = 256


@dataclass(frozen=True)
class ConnectionOptions:
    """verify, read_only: as of kvw.connect. tick_s: pause between two looks at the daemon. engine:
    whose requests notes are of."""

    verify: str = "always"
    read_only: bool = False
    tick_s: float = 0.25
    engine: str = ""


class DaemonConnection:
    """Keeps one client connected, and namespaces registered, in a thread of its own.

    address: of this host's daemon, unix:///...; it need not be there yet. Raises UsageError where
    the address itself is bad."""

    def __init__(self, address: str, options: ConnectionOptions | None = None) -> None:
        self._address = address
        self._options = options or ConnectionOptions()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._client: kvw.Client | None = None
        self._wanted: dict[bytes, kvw.Namespace] = {}
        self._opened: dict[bytes, kvw.OpenNamespace] = {}
        self._refused: dict[bytes, kvw.UsageError] = {}
        self._refused_by = 0  # the incarnation that did
        self._looked = threading.Condition(self._lock)
        self._name = f"{options.engine}-{os.getpid()}" if options and options.engine else ""
        self._notes: deque[kvw.RequestNote] = deque(maxlen=_MOST_NOTES)
        self._last_problem = ""
        self._stalled_looks = 0
        self._device_address = 0
        self._look()
        self._thread = threading.Thread(target=self._run, name="kvw-connection", daemon=True)
        self._thread.start()

    @property
    def client(self) -> kvw.Client | None:
        """None until a daemon was found. It may be out of date: what it maps stays valid."""
        return self._client

    @property
    def problem(self) -> str:
        """Why there is no daemon, for people; "" when there is one."""
        return self._last_problem

    def namespace(self, space: kvw.Namespace) -> kvw.OpenNamespace | None:
        """`space` at the daemon; None until the thread has registered it, which this asks for.
        Never blocks."""
        found = self._opened.get(space.id)
        if found is None:
            self._want(space)
        return found

    def prepare_device(self, address: int) -> None:
        """Has the kernels on the device of this address before its pages are loaded or stored, now
        and at every daemon to come. Blocks for a moment."""
        self._device_address = address
        if self._client is not None:
            self._prepare(self._client)

    def _prepare(self, client: kvw.Client) -> None:
        try:
            kvw.gpu.prepare(self._device_address, client)
        except kvw.WarehouseError as error:  # the first load or store says it to who can act
            _log.debug("the device could not be prepared: %s", error)

    def wait_namespace(self, space: kvw.Namespace, timeout_s: float) -> kvw.OpenNamespace | None:
        """Like `namespace`, but waits for the thread for at most timeout_s, and not at all without
        a daemon. Raises UsageError where the daemon refuses the namespace, because its pages fit no
        slab."""
        self.namespace(space)
        with self._looked:
            self._looked.wait_for(
                lambda: space.id in self._opened or space.id in self._refused or bool(self.problem),
                timeout_s,
            )
            if space.id in self._refused:
                # A copy: what is raised holds its callers' frames, and with them what they store.
                raise copy.copy(self._refused[space.id])
            return self._opened.get(space.id)

    def call_failed(self, space: kvw.Namespace, error: BaseException) -> None:
        """Reports that a call for `space` raised `error`. Where that says that the daemon does not
        know the namespace, which happens after a restart, the namespace is registered anew; other
        errors change nothing. Never blocks."""
        if isinstance(error, kvw.UsageError) and error.code in _UNKNOWN:
            with self._lock:
                self._opened.pop(space.id, None)
            self._want(space)

    def call_or(
        self, space: kvw.Namespace, call: Callable[[kvw.OpenNamespace], _T], otherwise: _T
    ) -> _T:
        """Returns `call(namespace)`, or `otherwise` where there is no namespace or the call raises,
        which is logged and reported to `call_failed`."""
        opened = self.namespace(space)
        if opened is None:
            return otherwise
        try:
            return call(opened)
        except Exception as error:  # noqa: BLE001 - the engine's edge
            self.call_failed(space, error)
            level = logging.DEBUG if isinstance(error, kvw.WarehouseError) else logging.ERROR
            _log.log(level, "kvwarehouse: a call failed: %s: %s", type(error).__name__, error)
            return otherwise

    def note(self, note: kvw.RequestNote) -> None:
        """Has the thread tell the daemon what was found for a request. Never blocks; where there is
        no daemon, or requests come faster than it is told, the oldest are forgotten."""
        self._notes.append(replace(note, request_id=_bounded(note.request_id), engine=self._name))

    def _send_notes(self, client: kvw.Client) -> None:
        notes = [self._notes.popleft() for _ in range(min(len(self._notes), _NOTES_PER_LOOK))]
        if not notes:
            return
        try:
            client.note_requests(notes)
        except Exception as error:  # noqa: BLE001 - nobody's work; an older daemon has no such call
            _log.debug("notes of %d requests are lost: %s", len(notes), error)

    def control(self) -> kvw.Control | None:
        """The daemon's control page; None without a daemon that is alive. Reads shared memory."""
        control = self._page()
        silent = self._last_problem or self._stalled_looks >= _STALLED_LOOKS
        return None if silent and _late(control) else control

    def _page(self) -> kvw.Control | None:
        client = self._client
        if client is None:
            return None
        try:
            return client.control()
        except kvw.WarehouseError:
            return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._wake.set()
        self._thread.join(2 * _CALL_TIMEOUT_S)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _want(self, space: kvw.Namespace) -> None:
        with self._lock:
            if space.id in self._wanted or space.id in self._refused:
                return
            self._wanted[space.id] = space
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._options.tick_s)
            self._wake.clear()
            if self._closed:
                return
            self._stalled_looks = self._stalled_looks + 1 if _late(self._page()) else 0
            try:
                self._look()
            except Exception:  # noqa: BLE001 - a thread's edge: the next look may succeed
                _log.exception("the warehouse could not be looked at")

    def _look(self) -> None:
        """One look: connects or reconnects, and registers what is wanted."""
        try:
            if self._client is None:
                self._client = self._connected()
            elif not self._client.refresh(timeout_s=_CALL_TIMEOUT_S):
                self._tell("it does not answer")
                return
            self._register(self._client)
            self._tell("")
            self._send_notes(self._client)
        except kvw.UsageError as error:
            if error.code != "closed":  # as the process ends: there is nothing left to look at
                raise
        except kvw.WarehouseError as error:
            self._tell(str(error))

    def _connected(self) -> kvw.Client:
        client = kvw.connect(
            self._address,
            verify=self._options.verify,  # type: ignore[arg-type]  # checked by connect
            timeout_s=_CALL_TIMEOUT_S,
            patience_s=0.0,
            read_only=self._options.read_only,
        )
        if self._device_address:
            self._prepare(client)
        return client

    def _register(self, client: kvw.Client) -> None:
        incarnation = client.control().incarnation
        with self._lock:
            if self._last_problem or incarnation != self._refused_by:
                self._refused.clear()  # another daemon may have the room
            self._refused_by = incarnation
            wanted = list(self._wanted.values())
        for space in wanted:
            try:
                opened = client.open(space, reopen=False)
            except kvw.UsageError as error:
                _log.error("the warehouse refuses this model's pages: %s", error)
                with self._looked:
                    self._refused[space.id] = copy.copy(error)
                    self._wanted.pop(space.id, None)
                continue
            with self._looked:
                self._opened[space.id] = opened
                self._wanted.pop(space.id, None)

    def _tell(self, problem: str) -> None:
        if problem and not self._last_problem:
            _log.warning("no warehouse at %s, the engine computes: %s", self._address, problem)
        elif self._last_problem and not problem:
            _log.warning("the warehouse at %s serves again", self._address)
        with self._looked:
            self._last_problem = problem
            self._looked.notify_all()


def _late(control: kvw.Control | None) -> bool:
    return control is not None and control.heartbeat_age_s >= _STALLED_S


def _bounded(request_id: str) -> str:
    """Users choose a part of it. What is left out is not missed by who asks how it begins."""
    return request_id.encode("utf-8", "replace")[: kvw.RequestNote.MAX_ID_BYTES].decode(
        "utf-8", "ignore"
    )

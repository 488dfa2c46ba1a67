"""What stands between a ZeroMQ socket and whoever reaches its TCP port.

ZeroMQ keeps what a peer says without a bound: a message may have any number of parts, a subscriber
any number of subscriptions, and a port any number of peers. So TCP connections are taken here, a
few at a time, and their bytes carried to and from the socket, which listens on a private Unix one.
Who has said more than a subscriber says, or does not read, is ended; ZeroMQ's subscribers connect
again by themselves.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import Final

from kvwarehouse.addresses import split_address
from kvwarehouse.daemon.admission import host_of

PEERS_MAX: Final = 32
"""Connections at a time, half of them of one host; more are closed."""

SAID_BYTES: Final = 64 << 10
"""What a connection may say, all together: greetings, subscriptions, a thousand replays."""

STALL_S: Final = 10.0
"""How long a peer may take to read CARRIED_BYTES."""

CARRIED_BYTES: Final = 64 << 10

_BREATH_S: Final = 0.1
_VANISHED_MS: Final = 30_000


class _Peer:
    def __init__(self, outer: socket.socket, inner: socket.socket, host: str) -> None:
        self.outer, self.inner, self.host = outer, inner, host
        self.said_bytes = 0
        self.left = b""  # for it
        self.deadline_s = 0.0  # while anything is left


class Gate:
    """Listens from construction to close(), in a thread of its own."""

    def __init__(self, address: str, inner_path: str) -> None:
        """`address`: host:port or *:port. Raises OSError when it cannot be bound."""
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        where = ("" if host == "*" else host, port)
        self._inner_path = inner_path
        self.ended = 0  # peers that were refused or cut
        self._peers: set[_Peer] = set()
        self._listener = socket.create_server(where, family=family)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="kv-events-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        for each in (self._listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        with self._listener, self._woken, self._selector:
            while True:
                for key, mask in self._selector.select(self._wait_s()):
                    if key.fileobj is self._woken:
                        return self._end_all()
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._go_on(key.data, key.fileobj, mask)
                now = time.monotonic()
                for peer in [peer for peer in self._peers if peer.left and peer.deadline_s <= now]:
                    self._cut(peer)

    def _wait_s(self) -> float | None:
        ends = [peer.deadline_s for peer in self._peers if peer.left]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self) -> None:
        try:
            outer, there = self._listener.accept()
        except BlockingIOError:
            return  # it is gone
        except OSError:  # no descriptor is left
            time.sleep(_BREATH_S)
            return
        try:
            host = host_of(there[0])
            of_host = sum(peer.host == host for peer in self._peers)
            if len(self._peers) >= PEERS_MAX or of_host >= PEERS_MAX // 2:
                raise ConnectionRefusedError
            peer = _Peer(outer, socket.socket(socket.AF_UNIX), host)
        except OSError:
            self.ended += 1
            outer.close()
            return
        self._peers.add(peer)
        for each in (outer, peer.inner):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ, peer)
        try:
            _notice_vanished(outer)
            peer.inner.connect(self._inner_path)
        except OSError:
            self._cut(peer)

    def _go_on(self, peer: _Peer, ready: object, mask: int) -> None:
        if peer not in self._peers:
            return  # ended behind the same select
        try:
            if ready is peer.inner:  # asked only while nothing is left
                peer.left = _read(peer.inner, CARRIED_BYTES)
                peer.deadline_s = time.monotonic() + STALL_S
                self._carry(peer)
                return
            if mask & selectors.EVENT_READ:
                self._hear(peer)
            if mask & selectors.EVENT_WRITE:
                self._carry(peer)
        except BlockingIOError:
            pass
        except EOFError:
            self._end(peer)
        except OSError:
            self._cut(peer)

    def _hear(self, peer: _Peer) -> None:
        said = _read(peer.outer, SAID_BYTES + 1)
        peer.said_bytes += len(said)
        if peer.said_bytes > SAID_BYTES or peer.inner.send(said) < len(said):
            raise ConnectionRefusedError

    def _carry(self, peer: _Peer) -> None:
        waited = bool(self._selector.get_key(peer.outer).events & selectors.EVENT_WRITE)
        with contextlib.suppress(BlockingIOError):
            peer.left = peer.left[peer.outer.send(peer.left) :]
        if waited == bool(peer.left):
            return
        if waited:
            self._selector.modify(peer.outer, selectors.EVENT_READ, peer)
            self._selector.register(peer.inner, selectors.EVENT_READ, peer)
        else:  # nothing more is read for it until it has read this
            self._selector.modify(peer.outer, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            self._selector.unregister(peer.inner)

    def _cut(self, peer: _Peer) -> None:
        self.ended += 1
        self._end(peer)

    def _end(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        for each in (peer.outer, peer.inner):
            with contextlib.suppress(KeyError):  # while it is not asked
                self._selector.unregister(each)
            each.close()

    def _end_all(self) -> None:
        for peer in list(self._peers):
            self._end(peer)


def _read(there: socket.socket, most_bytes: int) -> bytes:
    said = there.recv(most_bytes)
    if not said:
        raise EOFError
    return said


def _notice_vanished(peer: socket.socket) -> None:
    """A host that went without a word keeps its place for no longer than this."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_MS // 1000)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_MS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

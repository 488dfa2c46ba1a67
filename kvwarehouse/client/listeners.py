"""Whose process listens where a connection to this host would go. A port of loopback is free for
every user while nobody has it, and nothing of the connection itself says who took it.

The kernel is asked about this process's network namespace: over a netlink socket, which takes a
tenth of a millisecond, or, where that is shut, by /proc/net, which takes some milliseconds because
it goes through all connections of the host. Who listens in another namespace, behind rules of a
packet filter that lead there, is seen by neither.

Formats: sock_diag(7), linux/inet_diag.h; Linux, Documentation/networking/proc_net_tcp.

Stateless; thread-safe.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST_DUMP: Final = 0x301
_DONE: Final = 3
_LISTEN: Final = 10  # TCP_LISTEN of net/tcp_states.h
_ANSWER_BYTES: Final = 1 << 16
_ANSWER_S: Final = 1.0

_MESSAGE_HEAD: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBBI")
_PORTS: Final = struct.Struct("!HH")
_ERROR: Final = struct.Struct("=i")
_ANY_REST: Final = bytes(36) + b"\xff" * 8
"""Of inet_diag_sockid: all addresses and interfaces, no cookie."""

_FAMILY_AT: Final = 0
_PORT_AT: Final = 4
_ADDRESS_AT: Final = 8
_UID_AT: Final = 64


@dataclass(frozen=True)
class Listener:
    at: _Ip
    uid: int
    """As this process's user namespace shows it."""


def listeners_of(hosts: Iterable[str], port: int) -> list[Listener]:
    """Those who get connections to one of these IP addresses. None where nobody is seen, or where
    nobody tells."""
    found = _all(port)
    return [each for host in hosts for each in _first_of(found, ipaddress.ip_address(host))]


def _first_of(found: list[Listener], address: _Ip) -> list[Listener]:
    """Several only if they are one user's (SO_REUSEPORT)."""
    for at in _in_turn(_plain(address)):
        if here := [each for each in found if each.at == at]:
            return here
    return []


def _in_turn(address: _Ip) -> Iterator[_Ip]:
    """Where the kernel looks for a listener: who has the address itself comes first."""
    yield address
    if address.version == 4:
        yield ipaddress.IPv4Address(0)
    yield ipaddress.IPv6Address(0)


def _plain(address: _Ip) -> _Ip:
    """A socket of IPv6 with an address of IPv4 gets connections to that."""
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or ipaddress.IPv6Address(int(address))  # without its zone
    return address


def _all(port: int) -> list[Listener]:
    for ask in (_by_netlink, _by_proc):
        try:
            return ask(port)
        except OSError:
            continue  # not here: in gVisor, or where a unit or seccomp allows no such socket
    return []


def _by_netlink(port: int) -> list[Listener]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_S)
        return [
            listener
            for family in (socket.AF_INET, socket.AF_INET6)
            for listener in _dumped(kernel, family, port)
        ]


def _dumped(kernel: socket.socket, family: int, port: int) -> Iterator[Listener]:
    request = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _LISTEN)
        + _PORTS.pack(port, 0)
        + _ANY_REST
    )
    size = _MESSAGE_HEAD.size + len(request)
    kernel.send(_MESSAGE_HEAD.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + request)
    while True:
        answer = kernel.recv(_ANSWER_BYTES)
        while answer:
            size, kind = _MESSAGE_HEAD.unpack_from(answer)[:2]
            if kind == _DONE:
                _check_done(answer[_MESSAGE_HEAD.size : size])
                return
            if kind != _SOCK_DIAG_BY_FAMILY:
                raise OSError("the kernel does not tell who listens")
            if _PORTS.unpack_from(answer, _MESSAGE_HEAD.size + _PORT_AT)[0] == port:
                yield _listener(answer[_MESSAGE_HEAD.size : size])
            answer = answer[(size + 3) & ~3 :]


def _check_done(said: bytes) -> None:
    """A kernel without the handler of TCP says so at the end of a list of nobody."""
    if len(said) >= _ERROR.size and (error := _ERROR.unpack_from(said)[0]) < 0:
        raise OSError(-error, os.strerror(-error))


def _listener(said: bytes) -> Listener:
    size = 4 if said[_FAMILY_AT] == socket.AF_INET else 16
    at = ipaddress.ip_address(said[_ADDRESS_AT : _ADDRESS_AT + size])
    return Listener(_plain(at), struct.unpack_from("=I", said, _UID_AT)[0])


def _by_proc(port: int) -> list[Listener]:
    found: list[Listener] = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/thread-self/net/{table}", encoding="ascii") as rows:
                found += _listed(rows, port)
        except FileNotFoundError:
            if table == "tcp":
                raise
            # A kernel without IPv6 has no table of it.
    return found


def _listed(rows: Iterable[str], port: int) -> Iterator[Listener]:
    at_port = f":{port:04X} "
    for row in rows:
        if at_port not in row:  # before it is split: a host may have very many connections
            continue
        fields = row.split()
        address, _, own_port = fields[1].partition(":")
        if int(own_port, 16) == port and int(fields[3], 16) == _LISTEN:
            yield Listener(_plain(_from_words(address)), int(fields[7]))


def _from_words(text: str) -> _Ip:
    """Hex digits of 32-bit words in the host's order of bytes."""
    words = len(text) // 8
    shown = struct.unpack(f">{words}I", bytes.fromhex(text))
    return ipaddress.ip_address(struct.pack(f"={words}I", *shown))

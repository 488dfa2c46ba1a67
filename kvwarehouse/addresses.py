"""Host and port of TCP addresses, as the daemon listens on them and clients connect to them.
Stateless."""

from __future__ import annotations

import ipaddress


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of a checked "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def joined_address(host: str, port: int) -> str:
    """What split_address() takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loopback_ips(host: str) -> tuple[str, ...]:
    """The IP addresses that a host means if all of them can only be reached from this host; else
    none. A name other than localhost cannot be known to be such a one."""
    if host == "localhost":
        return "127.0.0.1", "::1"  # gRPC tries both, whatever /etc/hosts says
    try:
        ours = ipaddress.ip_address(host).is_loopback
    except ValueError:
        ours = False
    return (host,) if ours else ()


def is_loopback(address: str) -> bool:
    """Whether host:port can only be reached from this host."""
    return bool(loopback_ips(split_address(address)[0]))

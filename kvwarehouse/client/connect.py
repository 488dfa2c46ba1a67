"""Connecting: from an address to a client, or to a clear error at once."""

from __future__ import annotations

import os

from kvwarehouse.client.client import Client
from kvwarehouse.client.endpoint import Credentials, checked_timeout, parse_address
from kvwarehouse.client.grpc_transport import Grpc
from kvwarehouse.client.rpc import Channel
from kvwarehouse.client.session import Verify, checked_session, shared_memory


def connect(  # noqa: PLR0913  all but the address by name, and each for some callers only
    address: str,
    *,
    verify: Verify = "always",
    token: str | None = None,
    tls: bool | str | os.PathLike[str] | None = None,
    timeout_s: float = 10.0,
    patience_s: float | None = None,
    read_only: bool = False,
) -> Client:
    """Connects to a daemon.

    address: "unix:///path/kvw.sock" for the daemon of this host (KV moves through shared memory),
    or "host:port" for another (KV moves over gRPC). verify: "always" checks the digest of every
    page loaded; "boundary" only of those from NVMe, remote and re-attached memory. token, tls: for
    "host:port"; tls=True trusts the system's authorities, tls=PATH those of a PEM file. timeout_s:
    bound of connecting and of every administrative call.

    On the daemon's host only: patience_s, what a lookup, tiers, load or pin may spend on the hello
    of a daemon that was replaced: None for up to 20 ms (loads a quarter of their time); 0 for
    nothing, for engines whose scheduler must not wait: they go on with the memory that is mapped,
    until a store or `client.refresh` has found the new daemon. read_only=True maps the pages
    without the right to write them; a store is then a UsageError (code "read_only").

    The client is a context manager. It survives restarts of the daemon. Raises TransportError when
    there is no daemon, at once; also (code "daemon_untrusted") when who is there on this host is
    neither of this process's user, nor root, nor $KVW_DAEMON_UID: it would be given KV. UsageError
    on a bad argument."""
    where = parse_address(address)
    session = checked_session(where, verify, patience_s, read_only)
    if session is None:
        return connect_grpc(address, token=token, tls=tls, timeout_s=timeout_s)
    channel = Channel(where, Credentials(token, tls), checked_timeout(timeout_s))
    return Client(channel, shared_memory(channel.endpoint, session))


def connect_grpc(
    address: str,
    *,
    token: str | None = None,
    tls: bool | str | os.PathLike[str] | None = None,
    timeout_s: float = 10.0,
) -> Client:
    """As `connect`, with KV over gRPC on the daemon's own host too: for administration, which needs
    no session, and where a socket is shared and memory is not."""
    channel = Channel(parse_address(address), Credentials(token, tls), checked_timeout(timeout_s))
    client = Client(channel, Grpc(channel))
    try:
        client.status()
    except BaseException:
        client.close()
        raise
    return client

"""Connecting in an event loop: from an address to a client, or to a clear error at once."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from kvwarehouse.aio.client import Client
from kvwarehouse.aio.grpc_transport import RemotePath
from kvwarehouse.aio.life import Life
from kvwarehouse.aio.rpc import Channel
from kvwarehouse.aio.threads import Threads
from kvwarehouse.client.endpoint import Credentials, parse_address
from kvwarehouse.client.prompt import checked_timeout
from kvwarehouse.client.session import Session, Verify, checked_session, local_path

if TYPE_CHECKING:
    from kvwarehouse.aio.shared_memory import LocalPath


async def connect(  # noqa: PLR0913  the arguments of kvwarehouse.connect
    address: str,
    *,
    verify: Verify = "always",
    token: str | None = None,
    tls: bool | str | os.PathLike[str] | None = None,
    timeout_s: float = 10.0,
    patience_s: float | None = None,
    read_only: bool = False,
) -> Client:
    """Connects to a daemon, for use in the running event loop. Arguments, errors and what the
    client does are those of `kvwarehouse.connect`.

    A client of the daemon's host has threads of its own, 8 for calls. Where patience_s is more
    than 0.02 its lookups go to them too, so that none holds up the loop."""
    where = parse_address(address)
    session = checked_session(where, verify, patience_s, read_only)
    if session is None:
        return await connect_grpc(address, token=token, tls=tls, timeout_s=timeout_s)
    life = Life()
    channel = Channel(where, Credentials(token, tls), checked_timeout(timeout_s), life)
    return Client(life, channel, await _local(channel, session))


async def connect_grpc(
    address: str,
    *,
    token: str | None = None,
    tls: bool | str | os.PathLike[str] | None = None,
    timeout_s: float = 10.0,
) -> Client:
    """As `connect`, with KV over gRPC on the daemon's own host too."""
    life = Life()
    where, credentials = parse_address(address), Credentials(token, tls)
    channel = Channel(where, credentials, checked_timeout(timeout_s), life)
    client = Client(life, channel, RemotePath(channel))
    try:
        await client.status()
    except BaseException:
        await client.close()
        raise
    return client


async def _local(channel: Channel, session: Session) -> LocalPath:
    # Not at the top: remote clients, and tests of them, need no native core.
    from kvwarehouse.aio.shared_memory import LocalPath

    threads = Threads()
    try:
        path = await threads.begin(
            partial(local_path, channel.dial, session), undo=lambda path: path.close()
        )
    except BaseException:
        threads.end()
        raise
    return LocalPath(path, session.patience_s, threads)

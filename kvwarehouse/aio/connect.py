"""Connecting in an event loop: from an address to a client, or to a clear error at once."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from kvwarehouse.aio.client import Client
from kvwarehouse.aio.grpc_transport import AsyncGrpc
from kvwarehouse.aio.life import Life
from kvwarehouse.aio.rpc import AsyncChannel
from kvwarehouse.aio.threads import Threads
from kvwarehouse.client.endpoint import Credentials, checked_timeout, parse_address
from kvwarehouse.client.session import Session, Verify, checked_session, shared_memory

if TYPE_CHECKING:
    from kvwarehouse.aio.shared_memory import AsyncSharedMemory


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
    channel = AsyncChannel(where, Credentials(token, tls), checked_timeout(timeout_s), life)
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
    channel = AsyncChannel(where, credentials, checked_timeout(timeout_s), life)
    client = Client(life, channel, AsyncGrpc(channel))
    try:
        await client.status()
    except BaseException:
        await client.close()
        raise
    return client


async def _local(channel: AsyncChannel, session: Session) -> AsyncSharedMemory:
    # Not at the top: remote clients, and tests of them, need no native core.
    from kvwarehouse.aio.shared_memory import AsyncSharedMemory

    threads = Threads()
    try:
        path = await threads.begin(
            partial(shared_memory, channel.endpoint, session), undo=lambda path: path.close()
        )
    except BaseException:
        threads.end()
        raise
    return AsyncSharedMemory(path, session.patience_s, threads)

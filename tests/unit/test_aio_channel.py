"""A stream of requests to a daemon that dies: its end is told by the answer, and by nothing
else."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import grpc
import pytest

from kvwarehouse.aio.rpc import sent


class Dead:
    """A call whose connection is lost between the last request and the end of the stream. There
    grpcio (1.76 to 1.85) raises its own InternalError: seen once in some hundred kills."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.cancelled = False

    async def write(self, request: Any) -> None:
        """Taken."""

    async def done_writing(self) -> None:
        self.closed.set()
        raise grpc.aio.InternalError('Failed "execute_batch"')

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self.closed.wait().__await__()
        yield from asyncio.sleep(0).__await__()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed"
        )


def test_stream_to_a_daemon_that_died_ends_with_the_status_of_the_call() -> None:
    async def run() -> None:
        call = Dead()
        with pytest.raises(grpc.RpcError) as raised:
            await sent(call, iter([b"page"]))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not call.cancelled

    asyncio.run(run())

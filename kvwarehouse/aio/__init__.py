"""The client for asyncio: the names, arguments, results and errors of `kvwarehouse.connect`.

    async with await kvwarehouse.aio.connect("unix:///path/kvw.sock") as client:
        ns = await client.open(space)
        await ns.store(tokens, pages)
        filled = await ns.load(tokens, out)
        async for message in client.watch():
            ...

Every method is awaited, but for those that list or watch: they are iterated with `async for`.

A client belongs to the event loop that connected it; elsewhere its calls raise UsageError (code
"wrong_loop"). Lookups and tiers of a local daemon run in the loop: they read shared memory for
microseconds. What copies or may wait runs in at most 8 threads of the client's own, and other
hosts are asked over grpc.aio; both leave the loop to others.

Cancelling: a call to another host ends at once, and with it the RPC. A local call that has begun
to copy is waited for, at most its timeout_s, and its task is cancelled then: the buffers are the
caller's again, nothing writes into them later, and pins that it took are released.
"""

from kvwarehouse.aio.client import Client
from kvwarehouse.aio.connect import connect
from kvwarehouse.aio.namespace import OpenNamespace
from kvwarehouse.aio.routing import who_has

__all__ = ["Client", "OpenNamespace", "connect", "who_has"]

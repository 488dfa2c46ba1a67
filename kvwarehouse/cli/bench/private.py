"""A private daemon that has taken its memory: taking it would be measured too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvwarehouse.cli.bench.options import Bench
from kvwarehouse.client import Client, connect
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse.errors import CapacityError

_SETTLE_S = 60.0


@contextmanager
def private_daemon(settings: Mapping[str, Any]) -> Iterator[tuple[PrivateDaemon, Client]]:
    with PrivateDaemon(settings) as daemon, connect(daemon.address) as client:
        _settle(client)
        yield daemon, client


@contextmanager
def for_one_size(bench: Bench) -> Iterator[Client]:
    """A daemon that has met no other page size, where the bench may choose: what another size has
    left behind would be measured too."""
    if bench.daemon is None:
        yield bench.client
        return
    with private_daemon({"dram": bench.options.dram_bytes}) as (_, client):
        yield client


def _settle(client: Client) -> None:
    end = time.monotonic() + _SETTLE_S
    while client.status()["core"]["tiers"]["dram"]["health"] == "populating":
        if time.monotonic() > end:
            raise CapacityError(
                f"the private daemon has not taken its memory within {_SETTLE_S:.0f} s; use a"
                " smaller --bytes",
                code="bench_room",
            )
        time.sleep(0.1)

"""A private daemon that has taken its memory: taking it would be measured too."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from kvwarehouse.client import Client, connect
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse.errors import CapacityError
from kvwarehouse_bench.harness.alternation import Rounds, joined
from kvwarehouse_bench.micro.options import Bench

Side = TypeVar("Side", bound=Hashable)

_SETTLE_S = 60.0
_DAEMONS = 3


@contextmanager
def private_daemon(settings: Mapping[str, Any]) -> Iterator[tuple[PrivateDaemon, Client]]:
    with PrivateDaemon(settings) as daemon, connect(daemon.address) as client:
        _settle(client)
        yield daemon, client


def for_one_size(
    bench: Bench, measured: Callable[[Client, int], dict[Side, Rounds]]
) -> dict[Side, Rounds]:
    """`measured(client, rounds)` for each side, all of the bench's rounds together. Where the bench
    may choose, in one daemon after the other: none of them has met another page size, which leaves
    something behind; and where the memory of one lies is luck that all of its rounds share."""
    if bench.daemon is None:
        return measured(bench.client, bench.options.rounds)
    parts = []
    for daemon in range(_DAEMONS):
        with private_daemon({"dram": bench.options.dram_bytes}) as (_, client):
            parts.append(measured(client, len(range(daemon, bench.options.rounds, _DAEMONS))))
    return {side: joined([part[side] for part in parts]) for side in parts[0]}


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

"""A daemon with a remote tier, alone in its fleet, and how its pages go to the store and come from
it, each whole way for a clock. Not thread-safe.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from kvwarehouse.client import Client, OpenNamespace, connect
from kvwarehouse.errors import CapacityError, WarehouseError
from kvwarehouse_bench.harness.alternation import timed
from kvwarehouse_bench.harness.lone_host import LoneDaemon
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import bench_space
from kvwarehouse_bench.micro.remote_store import BenchStore

_WAIT_S = 120.0
_STEP_S = 0.01
_IN_THE_STORE = ("stored", "refreshed", "already")
"""Ends of puts; the last two come over midnight, when what is there is of the day before."""
_EVICTED_AT_ONCE = 100_000
_FORGOTTEN_S = 1.1
"""A daemon knows for a second how a read ended, and does not read again what has left by then
(native/warehouse/fetches.cc)."""
_LOOK_S = 0.001
"""Between two looks at what is put, at least; and of the time so far, at most _LOOK_SHARE."""
_LOOK_SHARE = 0.25
_LEAST_CAPACITY_BYTES = 1 << 40
_CAPACITY_SHARE = 4
"""A daemon may put a third of what is free, and all rounds have to find room."""

_T = TypeVar("_T")


class RemoteHost:
    """`daemon` runs; `client` is connected to it."""

    def __init__(self, daemon: LoneDaemon, client: Client) -> None:
        self.daemon, self.client = daemon, client
        self._read_s = float("-inf")  # when it read last

    @property
    def tier(self) -> dict[str, Any]:
        """Its state, and what became of puts and gets, as of the worker's last report."""
        found: dict[str, Any] = self.client.status()["remote"]
        return found

    @property
    def core(self) -> dict[str, Any]:
        """What the core counts, as of now."""
        found: dict[str, Any] = self.client.status()["core"]
        return found

    def open(self, page_bytes: int) -> OpenNamespace:
        """The bench's own namespace for such pages. It is not cleared: that would go to the store,
        where the fleet has none of it yet."""
        return self.client.open(bench_space(page_bytes))

    def until(self, ask: Callable[[], _T | None], what: str) -> _T:
        """The first answer that is true."""
        end = time.monotonic() + _WAIT_S
        while not (answer := ask()):
            if time.monotonic() > end:
                tier = self.tier
                raise WarehouseError(
                    f"not within {_WAIT_S:.0f} s: {what}; the tier is {tier['state']}"
                    f" {tier['reason']}".rstrip(),
                    code="bench",
                )
            time.sleep(_STEP_S)
        return answer

    def until_serving(self) -> None:
        """Until it may put and read."""

        def serves() -> bool:
            tier = self.tier
            if tier["state"] not in ("starting", "serving"):
                raise WarehouseError(f"the store: {tier['state']}: {tier['reason']}", code="bench")
            return bool(tier["state"] == "serving")

        self.until(serves, "the remote tier serves")

    # --- pages

    def empty(self) -> None:
        """Until none of its own tiers has a page."""
        self.until(
            lambda: self.client.evict(None, _EVICTED_AT_ONCE, "all") == 0, "its tiers are empty"
        )

    def until_remote(self, ns: OpenNamespace, tokens: NDArray[Any], count: int) -> None:
        """Until lookups find `count` pages, all of them in the store alone."""
        self.until(
            lambda: _found(ns, tokens) == {"remote": count}, "all pages are found in the store"
        )

    def put(self, ns: OpenNamespace, tokens: NDArray[Any], pages: NDArray[Any]) -> float:
        """Stores pages that the store has not, and seconds from then on until it has acknowledged
        all of their objects. The worker stands still while they are stored."""
        before, told = self.core["remote_puts"], self.tier["puts"]
        with self._worker_stands():
            check_filled(ns.store(tokens, pages, timeout_s=_WAIT_S).stored, len(pages))
            offered = self.core["remote_puts"]["offered_runs"] - before["offered_runs"]
        taken = timed(lambda: self._until_put(offered))
        dropped = _dropped(self.core["remote_puts"]) - _dropped(before)
        ended = self.until(
            lambda: self._ended(sum(told.values()) + offered - dropped),
            "the worker reports what it put",
        )
        missing = {
            result: count - told.get(result, 0)
            for result, count in ended.items()
            if result not in _IN_THE_STORE and count > told.get(result, 0)
        }
        if dropped or missing:
            raise CapacityError(
                f"of {offered} objects not all were put: {missing}, {dropped} dropped; look at the"
                " store, or use a smaller --bytes",
                code="bench_room",
            )
        return taken

    def load(self, ns: OpenNamespace, tokens: NDArray[Any], out: NDArray[Any]) -> float:
        """Seconds of a load of pages that only the store has."""
        time.sleep(max(0.0, self._read_s + _FORGOTTEN_S - time.monotonic()))
        self.empty()
        self.until_remote(ns, tokens, len(out))
        before = self.core["loads"]["pages_from_remote"]
        loaded: Any = 0

        def load() -> None:
            nonlocal loaded
            loaded = ns.load(tokens, out, timeout_s=_WAIT_S)

        taken = timed(load)
        self._read_s = time.monotonic()
        if loaded != len(out):
            raise WarehouseError(
                f"{int(loaded)} of {len(out)} pages came from the store; missed: {loaded.missed}",
                code="bench",
            )
        check_filled(self.core["loads"]["pages_from_remote"] - before, len(out))
        return taken

    def _ended(self, count: int) -> dict[str, int] | None:
        puts: dict[str, int] = self.tier["puts"]
        return puts if sum(puts.values()) >= count else None

    def _until_put(self, offered: int) -> None:
        """Looks as seldom as it can: each takes of the processor."""
        begin = time.perf_counter()
        while left := _left(self.core["remote_puts"]):
            taken_s = time.perf_counter() - begin
            if taken_s > _WAIT_S:
                raise CapacityError(
                    f"{left} of {offered} objects were not put within {_WAIT_S:.0f} s; use a"
                    " smaller --bytes",
                    code="bench_room",
                )
            share = min(left / (2 * max(offered - left, 1)), _LOOK_SHARE)
            time.sleep(max(taken_s * share, _LOOK_S))

    @contextmanager
    def _worker_stands(self) -> Iterator[None]:
        pid = worker_pid(self.daemon.log_path)
        os.kill(pid, signal.SIGSTOP)
        try:
            self.until(lambda: _stands(pid), "the worker stands still")
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


def _found(ns: OpenNamespace, tokens: NDArray[Any]) -> dict[str, int]:
    return {tier: count for tier, count in ns.lookup(tokens).by_tier.items() if count}


def _dropped(puts: Mapping[str, Any]) -> int:
    dropped: dict[str, int] = puts["dropped"]
    return sum(dropped.values())


def _left(puts: Mapping[str, Any]) -> int:
    left: int = puts["queued_runs"] + puts["runs_under_way"]
    return left


def worker_pid(log: Path) -> int:
    """Of the last worker that a daemon's log names."""
    lines = log.read_text("utf-8", "replace").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    started = [event["pid"] for event in events if event["event"] == "remote_worker_started"]
    if not started:
        raise WarehouseError("the daemon has started no worker", code="bench")
    return int(started[-1])


def _stands(pid: int) -> bool:
    """All of its threads do."""
    states = [
        (task / "stat").read_text("utf-8").rpartition(")")[2].split()[0]
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return set(states) == {"T"}


def capacity_bytes(moved_bytes: int) -> int:
    """What the fleet's bound has to be for so much to be put."""
    return max(_LEAST_CAPACITY_BYTES, _CAPACITY_SHARE * moved_bytes)


@contextmanager
def remote_host(
    made: BenchStore,
    settings: Mapping[str, Any],
    prepare: Callable[[LoneDaemon], None] = lambda daemon: None,
) -> Iterator[RemoteHost]:
    """It serves, and its worker has ended when the block has. `prepare`: what is done before its
    start."""
    daemon = LoneDaemon({**made.settings, **settings})
    with ExitStack() as stack:
        stack.callback(daemon.remove)
        prepare(daemon)
        daemon.start()
        stack.callback(daemon.stop)  # a worker outlives a daemon that is killed, for a moment
        host = RemoteHost(daemon, stack.enter_context(connect(daemon.address)))
        host.until(
            lambda: host.core["tiers"]["dram"]["health"] != "populating",
            "the daemon has taken its memory; use a smaller --bytes",
        )
        host.until_serving()
        yield host

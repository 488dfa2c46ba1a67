"""Promised loads: tried again until all of it came, or nothing more of it came for a time.

The engine cannot hear that a load failed, and goes on as if its blocks were filled. So a load that
does not come raises, in the step that waits for it or from the next look at what is finished: never
a block with other bytes, never silence. Nor is one tried again that a clear came beside: what is
stored after it can be of other weights than the blocks that are filled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.self_test import SelfTest
from kvwarehouse_connectors.trtllm.counts import Counts
from kvwarehouse_connectors.trtllm.messages import LoadOrder
from kvwarehouse_connectors.trtllm.parts import Part
from kvwarehouse_connectors.trtllm.settings import PREFIX

_log = logging.getLogger(__name__)

_THREADS = 4
# After a try that brought nothing: a daemon that was replaced is found by the connection's thread.
_PAUSE_S = 0.02


@dataclass(frozen=True)
class LoadOptions:
    """shard: this rank's. timeout_s: how long a load is tried again, from each page that came."""

    shard: int
    timeout_s: float


class Loads:
    """cache: its parts, each with its namespace."""

    def __init__(
        self,
        connection: DaemonConnection,
        self_test: SelfTest,
        cache: Sequence[tuple[Part, kvw.Namespace]],
        options: LoadOptions,
        counts: Counts,
    ) -> None:
        self._connection = connection
        self._self_test = self_test
        self._parts = [part for part, _ in cache]
        self._spaces = [space for _, space in cache]
        self._shard = options.shard
        self._timeout_s = options.timeout_s
        self._counts = counts
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvw-load")
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._under_way: Counter[int] = Counter()
        self._done: set[int] = set()
        self._failure: BaseException | None = None
        self._expected: dict[int, float] = {}  # requests the engine waits for, and until when

    def begin(self, orders: Sequence[LoadOrder]) -> None:
        """In the engine's thread. Returns when what the step waits for is there; raises
        RuntimeError where that does not come."""
        for part in self._parts if orders else ():
            part.memory.after_engine()
        waited: list[Future[None]] = []
        for order in orders:
            if order.waits:
                waited.append(self._pool.submit(self._load, order))
            else:
                with self._lock:
                    self._under_way[order.request_id] += 1
                    self._done.discard(order.request_id)
                self._pool.submit(self._load_beside, order)
        failures = [future.exception() for future in waited]  # all ended: nothing writes blocks
        for failure in failures:
            if failure is not None:
                raise _broken(failure) from failure

    def finished(self, started: Sequence[int]) -> list[int]:
        """started: requests whose loads the engine waits for from now on. Returns those of them,
        and of earlier calls, whose loads are over; raises RuntimeError where one does not come."""
        now = time.monotonic()
        for name in started:
            # Twice: the order comes with the same step. One that is under way has its own bound.
            self._expected[name] = now + 2 * self._timeout_s
        with self._lock:
            if self._failure is not None:
                raise _broken(self._failure) from self._failure
            over = [name for name in self._expected if name in self._done]
            self._done.difference_update(over)
            under_way = set(self._under_way)
        for name in over:
            del self._expected[name]
        for name, until_s in self._expected.items():
            if now > until_s and name not in under_way:
                raise RuntimeError(
                    f"kvwarehouse: TensorRT-LLM waits for a load of request {name} that was never"
                    " ordered: please report this, with TensorRT-LLM's version"
                )
        return over

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- in the loading threads ----------------------------------------------------------------

    def _load_beside(self, order: LoadOrder) -> None:
        failure: BaseException | None = None
        try:
            self._load(order)
        except BaseException as error:  # noqa: BLE001 - a thread's edge; the engine's thread raises it
            failure = error
        with self._lock:
            self._failure = self._failure or failure
            self._under_way[order.request_id] -= 1
            if not self._under_way[order.request_id]:
                del self._under_way[order.request_id]
                self._done.add(order.request_id)

    def _load(self, order: LoadOrder) -> None:
        for run in order.runs:
            self._load_run(order, run)
        self._counts.add("loaded_blocks", sum(len(run.blocks) for run in order.runs))

    def _load_run(self, order: LoadOrder, run: PageRun) -> None:
        """Its time begins again with each page that came: how long all of them take depends on how
        many they are, and on the loads beside it."""
        done, reason = 0, "no daemon"
        tested = cleared = False
        end_s = time.monotonic() + self._timeout_s
        while done < len(run.blocks):
            came = 0
            opened = self._connection.namespace(self._spaces[run.group])
            if opened is not None:
                tested = tested or self._test_once(run)
                try:
                    loaded = self._try(opened, run, done, end_s)
                except kvw.WarehouseError as error:
                    self._connection.call_failed(self._spaces[run.group], error)
                    reason = str(error)
                else:
                    came = int(loaded)
                    reason = ", ".join(loaded.missed) or reason
                    cleared = "cleared" in loaded.missed
            done += came
            if done == len(run.blocks):
                return
            if came:
                end_s = time.monotonic() + self._timeout_s
            over = cleared or time.monotonic() >= end_s
            if over or self._closed.wait(0.0 if came else _PAUSE_S):
                self._counts.add("failed_loads")
                raise kvw.StorageError(
                    f"request {order.request_id} was promised {len(run.blocks)} blocks, and"
                    f" {done} came; the next one was tried for at most {self._timeout_s:g} s"
                    f" ({PREFIX}LOAD_TIMEOUT_S): {reason}",
                    code="promise_broken",
                )

    def _try(self, opened: kvw.OpenNamespace, run: PageRun, done: int, end_s: float) -> kvw.Loaded:
        part = self._parts[run.group]
        shard = 0 if part.replicated else self._shard
        left_s = max(0.0, end_s - time.monotonic())
        return part.memory.load(opened, run, done, shard, left_s)

    def _test_once(self, run: PageRun) -> bool:
        """Once: that bytes keep their way, in blocks that hold nothing yet."""
        if not self._self_test.round_trip(self._parts[run.group].memory, run.blocks):
            raise kvw.InternalError(
                "the self-test came back with other bytes; nothing is loaded", code="self_test"
            )
        return True


def _broken(failure: BaseException) -> RuntimeError:
    return RuntimeError(
        f"kvwarehouse could not deliver KV that it had promised: {failure}. TensorRT-LLM cannot"
        " compute it instead, so the engine ends here; start it again"
    )

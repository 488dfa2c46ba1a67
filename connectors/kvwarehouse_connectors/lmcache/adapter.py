"""WarehouseL2Adapter: the warehouse of this host as an L2 of LMCache's server.

LMCache's store controller and prefetch controller call it, each in a thread of its own, and poll
its three event fds; neither ever waits here. All that is not LMCache's shape is in adapter_core.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.lmcache import compat
from kvwarehouse_connectors.lmcache.adapter_core import AdapterCore, StoreAnswer
from kvwarehouse_connectors.lmcache.chunks import layout_of
from kvwarehouse_connectors.lmcache.results import TaskResults
from kvwarehouse_connectors.lmcache.settings import read_settings


class WarehouseL2Adapter(compat.L2AdapterInterface):
    """params: `adapter_params` of the plugin (settings.py). Blocks for reading the weights' files,
    and for a daemon that is there, which need not be. Raises UsageError where the settings are bad,
    which ends the start of LMCache's server."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        # No capacity: the warehouse evicts by itself, and tells its sizes itself.
        super().__init__()
        self._core = AdapterCore(read_settings(params), compat.VERSION)
        self._lock = threading.Lock()
        self._last_task = 0
        self._stores: TaskResults[Any] = TaskResults(compat.create_event_notifier())
        self._lookups: TaskResults[Any] = TaskResults(compat.create_event_notifier())
        self._loads: TaskResults[Any] = TaskResults(compat.create_event_notifier())

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        task = self._task()

        def answer(stored: StoreAnswer) -> None:
            self._stores.put(task, compat.store_result(stored.complete, stored.size_bytes))

        self._core.store(keys, objects, answer)
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        task = self._task()
        layouts = {group: layout_of(one) for group, one in group_layout_descs.items()}
        self._core.lookup(keys, layouts, self._bits(self._lookups, task))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        self._core.unlock(keys)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        task = self._task()
        self._core.load(keys, objects, self._bits(self._loads, task))
        return task

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.take(task_id)

    def delete(self, keys: Sequence[Any]) -> None:
        """Raises UsageError: chunks leave the warehouse by its own eviction, or by its commands."""
        raise kvw.UsageError(
            "the warehouse deletes no single chunks for LMCache; it evicts by itself. To empty a"
            " namespace use `kvwarehouse clear`",
            code="unsupported",
        )

    def report_status(self) -> dict[str, Any]:
        return {"type": "kvwarehouse", **self._core.status()}

    def close(self) -> None:
        """Blocks until nothing touches LMCache's memory any more; calls under way have a bound."""
        self._core.close()
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    def _task(self) -> int:
        with self._lock:
            self._last_task += 1
            return self._last_task

    def _bits(self, results: TaskResults[Any], task: int) -> Any:
        def answer(found: NDArray[np.bool_]) -> None:
            results.put(task, compat.bitmap(found.tolist()))

        return answer

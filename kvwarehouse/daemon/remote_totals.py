"""What the workers of a daemon's life have counted, one after the other: a worker counts from its
own start. One owner; not thread-safe."""

from __future__ import annotations

from collections import Counter

from kvwarehouse.remote.report import WorkerReport
from kvwarehouse.wire import status_pb2


class RemoteTotals:
    def __init__(self) -> None:
        self._puts: Counter[str] = Counter()
        self._put_bytes = 0
        self._gets: Counter[str] = Counter()
        self._get_bytes = 0
        self._damaged: Counter[str] = Counter()
        self._deleted_objects = 0
        self._breaker_opened = 0

    def add(self, last: WorkerReport) -> None:
        """The last report of a worker that has ended."""
        self._puts.update(last.puts)
        self._put_bytes += last.put_bytes
        self._gets.update(last.gets)
        self._get_bytes += last.get_bytes
        self._damaged.update(last.damaged)
        self._deleted_objects += last.deleted_objects
        self._breaker_opened += last.breaker_opened

    def fill(self, status: status_pb2.RemoteStatus, running: WorkerReport | None) -> None:
        """With what the worker that runs has counted, if there is one."""
        now = running or WorkerReport("starting")
        status.puts.update(self._puts + Counter(now.puts))
        status.put_bytes = self._put_bytes + now.put_bytes
        status.gets.update(self._gets + Counter(now.gets))
        status.get_bytes = self._get_bytes + now.get_bytes
        status.damaged.update(self._damaged + Counter(now.damaged))
        status.deleted_objects = self._deleted_objects + now.deleted_objects
        status.breaker_opened = self._breaker_opened + now.breaker_opened

"""The file by which others find a ZeroMQ socket of this daemon, put back when somebody removed it.

Used by the one thread that has the socket; `problem` may be read by any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import zmq

from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.servers import file_at, is_gone
from kvwarehouse.errors import WarehouseError

LOOK_EVERY_S: Final = 1.0


class IpcFile:
    """`problem`: why new subscribers do not get in, "" where they do."""

    def __init__(self, path: str, prepare: Callable[[], None], log: Log) -> None:
        """`prepare`: makes its folder, where that is ours; may raise OSError or WarehouseError."""
        self._path, self._prepare, self._log = path, prepare, log
        self._file: tuple[int, int] | None = None
        self._look_at_s = 0.0
        self._bound = False
        self.problem = ""

    def bind(self, socket: Any) -> None:
        """Raises zmq.ZMQError."""
        socket.bind(f"ipc://{self._path}")
        self._file, self._bound = file_at(self._path), True

    def look(self, socket: Any) -> None:
        """Once a second, however often it is called. Does not raise. Who is connected is cut when
        the file is put back, and connects again."""
        now_s = time.monotonic()
        if now_s < self._look_at_s or not is_gone(self._path, self._file):
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        try:
            if self._bound:
                self._bound = False
                # ZeroMQ unlinks the name some time after this: it is bound at the next look.
                socket.unbind(f"ipc://{self._path}")
                return
            self._prepare()
            self.bind(socket)
        except (OSError, zmq.ZMQError, WarehouseError) as error:
            self._failed(error)
            return
        self.problem = ""
        self._log.event(Event.PATH_RESTORED, path=self._path, text="somebody removed it")

    def _failed(self, error: Exception) -> None:
        known = self.problem
        self.problem = (
            f"{self._path} was removed or replaced, and no new subscriber gets in: {error}"
        )
        if self.problem != known:
            self._log.event(Event.PATH_NOT_RESTORED, text=self.problem)

"""The remote tier as the daemon has it: a worker that runs, or the next one soon. The daemon serves
whatever becomes of it.

One thread starts workers, listens, and ends those that are silent; `status` is for any thread, and
waits for nothing. A worker that nothing ends, for a mount that hangs, is left behind: the tier is
off until it is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from kvwarehouse.config import Config
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.remote_clears import RemoteClears
from kvwarehouse.daemon.remote_process import RemoteProcess
from kvwarehouse.daemon.remote_totals import RemoteTotals
from kvwarehouse.errors import WarehouseError
from kvwarehouse.remote.report import (
    EXITS,
    ClearWritten,
    EpochsFound,
    FromWorker,
    WorkerReport,
    WorkerSettings,
)
from kvwarehouse.wire import status_pb2

LOOK_EVERY_S = 1.0
SILENT_LOOKS = 10
"""One after the other without a line: then the worker hangs. Looks and not seconds, so that a
daemon that stood still itself does not take its worker for silent."""
START_LOOKS = 60
"""Until the first line: libraries are loaded on a machine that may be busy."""

FIRST_WAIT_S: Final = 1.0
LAST_WAIT_S: Final = 30.0
SERVED_S: Final = 60.0
"""A worker that ran as long is followed by the next one after FIRST_WAIT_S."""
ENDS_WITHIN_S: Final = 60.0
STOPS_WITHIN_S: Final = 5.0

_OBJECT_BYTES: Final = 4 << 20
_OBJECTS_MIN: Final = 1 << 16
_OBJECTS_MAX: Final = 1 << 24

_EVENTS: Final = {
    event.value: event
    for event in (
        Event.REMOTE_SERVING,
        Event.REMOTE_FAILING,
        Event.REMOTE_REFUSED,
        Event.REMOTE_FULL,
        Event.REMOTE_WORKER_FAILED,
    )
}
_FIELDS: Final = ("text", "error")


def filter_objects(capacity_bytes: int) -> int:
    """How many the presence filter is made for: objects have 4 to 16 MiB, and small fleets a filter
    that costs little all the same."""
    return min(max(capacity_bytes // _OBJECT_BYTES, _OBJECTS_MIN), _OBJECTS_MAX)


class RemoteTier:
    """`core`: what runs; `fleet_id`: 32 hex digits; `node`: this daemon in its fleet, 64 bits;
    `clears`: of that fleet."""

    def __init__(
        self,
        config: Config,
        log: Log,
        core: Any,
        fleet_id: str,
        node: int,
        clears: RemoteClears,
    ) -> None:
        self._config, self._log, self._core, self._clears = config, log, core, clears
        self._fleet_id, self._node = fleet_id, node
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._totals = RemoteTotals()
        self._report: WorkerReport | None = None  # of the worker that runs
        self._last = WorkerReport("starting")  # of any
        self._reported_s = 0.0
        self._off = ""  # why there is no worker
        self._starts = 0
        self._listens_to = 0  # the number of a worker; 0: to none
        self._process: RemoteProcess | None = None
        self._thread = threading.Thread(target=self._run, name="kvw-remote-tier", daemon=True)

    def start(self) -> None:
        """Returns at once. The core runs."""
        self._thread.start()

    def stop(self) -> None:
        """Before the core stops. Waits for STOPS_WITHIN_S at most."""
        self._stop.set()
        process = self._process
        if process is not None:
            process.changed.set()
        self._thread.join(STOPS_WITHIN_S)

    def status(self) -> status_pb2.RemoteStatus:
        config = self._config
        with self._lock:
            last = self._last
            state = "off" if self._off else self._report.state if self._report else "starting"
            status = status_pb2.RemoteStatus(
                url=config.remote,
                state=state,
                reason=self._off or (self._report.reason if self._report else ""),
                write=config.remote_write,
                read=config.remote_read,
                capacity_bytes=config.remote_capacity_bytes,
                used_bytes=last.used_bytes,
                objects=last.objects,
                objects_max=filter_objects(config.remote_capacity_bytes),
                nodes=last.nodes,
                worker_starts=self._starts,
                listed_ago_s=self._by_now(last.listed_ago_s),
                read_bytes_per_s=last.read_bytes_per_s,
                first_byte_ms=last.first_byte_ms,
                epochs_owed=self._clears.owed,
                epochs_ago_s=self._by_now(last.epochs_ago_s),
                ttl_days=config.remote_ttl_days,
            )
            self._totals.fill(status, self._report)
        return status

    def _by_now(self, ago_s: float) -> float:
        """What the last report said to be so long ago; -1: never."""
        return ago_s + time.monotonic() - self._reported_s if ago_s >= 0 else -1.0

    # --- one worker after the other

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception as error:  # noqa: BLE001  a thread's edge
            self._log.event(Event.REMOTE_STOPPED, error=type(error).__name__, text=str(error))
            self._set_off("its supervision failed, which is a bug; please report it")

    def _supervise(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._stop.is_set():
            began_s = time.monotonic()
            why = self._live()
            if time.monotonic() - began_s >= SERVED_S:
                wait_s = FIRST_WAIT_S
            if self._stop.is_set():
                return
            if self._clears.failed:
                self._set_off(_clears_ended(self._clears.failed))
                return
            self._log.event(Event.REMOTE_WORKER_ENDED, **why, next_s=wait_s)
            self._set_off(f"its worker ended: {why['text']}; another one comes in {wait_s:g} s")
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, LAST_WAIT_S)

    def _live(self) -> dict[str, object]:
        """The life of one worker; how it ended, for the log."""
        try:
            process = self._started()
        except (OSError, WarehouseError) as error:
            return {"text": f"it could not be started: {error}"}
        self._log.event(Event.REMOTE_WORKER_STARTED, pid=process.pid)
        text = self._watch(process)
        self._clears.detach()
        self._end(process)
        with self._lock:
            self._listens_to = 0
            if self._report is not None:
                self._totals.add(self._report)
                self._report = None
        return {
            "pid": process.pid,
            "exit_code": process.exit_code,
            "text": text,
            "stderr": process.last_words,
        }

    def _started(self) -> RemoteProcess:
        number = self._starts + 1
        with self._lock:
            self._listens_to = number
        self._clears.begin(number)
        with contextlib.ExitStack() as workers:
            put_link_fd = self._linked(self._core.attach_remote, workers)
            get_link_fd = self._linked(self._core.attach_remote_gets, workers) if self._reads else 0
            settings = self._settings(put_link_fd, get_link_fd)
            self._process = RemoteProcess(settings, lambda said: self._hear(number, said))
        with self._lock:
            self._starts = number
            self._off = ""
        return self._process

    @property
    def _reads(self) -> bool:
        return self._config.remote_read == "on"

    def _linked(self, attach: Callable[[int], None], workers: contextlib.ExitStack) -> int:
        """A worker's end of a link, open until that one has inherited it. The core has the other
        end."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        workers.enter_context(its)
        attach(ours.detach())
        return its.fileno()

    def _settings(self, link_fd: int, get_link_fd: int) -> WorkerSettings:
        config, details = self._config, self._config.remote_file
        return WorkerSettings(
            link_fd=link_fd,
            get_link_fd=get_link_fd,
            socket=config.socket,
            presence_path=os.path.join(config.arena_dir, "presence"),
            fleet_id=self._fleet_id,
            node=self._node,
            url=config.remote,
            endpoint=details.endpoint,
            region=details.region,
            ca_file=details.ca_file,
            connect_s=details.connect_s,
            get_deadline_s=details.get_deadline_s,
            put_deadline_s=details.put_deadline_s,
            puts=details.puts,
            gets=details.gets,
            read=self._reads,
            write_bytes_per_s=details.write_bytes_per_s,
            write=config.remote_write,
            capacity_bytes=config.remote_capacity_bytes,
            ttl_days=config.remote_ttl_days,
            objects=filter_objects(config.remote_capacity_bytes),
        )

    def _watch(self, process: RemoteProcess) -> str:
        """Until it has ended, or is to be ended; why. It is told of clears once it has said a line:
        until then it may be loading its libraries, and read nothing."""
        silent, is_told = 0, False
        while not self._stop.is_set():
            said = process.changed.wait(LOOK_EVERY_S)
            process.changed.clear()
            if process.problem:
                return process.problem
            if self._clears.failed:  # nothing is read that another host may have cleared
                return _clears_ended(self._clears.failed)
            if process.exit_code is not None:
                return _meaning(process.exit_code)
            if process.heard and not is_told:
                self._clears.attach(process.tell)
                is_told = True
            silent = 0 if said else silent + 1
            if silent >= (SILENT_LOOKS if process.heard else START_LOOKS):
                return f"it said nothing for {silent * LOOK_EVERY_S:g} s, and was killed"
        return "the daemon ends"

    def _end(self, process: RemoteProcess) -> None:
        process.kill()
        killed_s = time.monotonic()
        while not process.wait(LOOK_EVERY_S):
            waited_s = time.monotonic() - killed_s
            if self._stop.is_set():
                if waited_s >= STOPS_WITHIN_S:
                    break
            elif not self._off and waited_s >= ENDS_WITHIN_S:
                self._leave_behind(process)
        process.close()

    def _leave_behind(self, process: RemoteProcess) -> None:
        why = (
            "its worker hangs in the kernel and cannot be ended, as on a mount that does not "
            "answer; look at that. Another one comes when it is gone"
        )
        self._log.event(Event.REMOTE_WORKER_HANGS, pid=process.pid, text=why)
        self._set_off(why)

    def _hear(self, number: int, said: FromWorker) -> None:
        """From the thread that reads that worker."""
        if isinstance(said, EpochsFound | ClearWritten):
            self._clears.heard(number, said)
            return
        if isinstance(said, WorkerReport):
            with self._lock:
                if number == self._listens_to:
                    self._report = self._last = said
                    self._reported_s = time.monotonic()
            return
        event = _EVENTS.get(said.event)
        if event is not None:
            fields = {name: said.fields[name] for name in _FIELDS if name in said.fields}
            self._log.event(event, **fields)

    def _set_off(self, why: str) -> None:
        with self._lock:
            self._off = why


def _clears_ended(why: str) -> str:
    return (
        f"its clears are not followed any more ({why}), which is a bug; please report it. Restart "
        "the daemon to have the tier again"
    )


def _meaning(exit_code: int) -> str:
    if exit_code < 0:
        return f"it was ended by signal {-exit_code}"
    return f"it ended by itself, {EXITS.get(exit_code, f'with code {exit_code}')}"

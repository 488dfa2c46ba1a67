"""The worker of the remote tier, a process of its own beside its daemon: it has the credentials,
the libraries of the stores, and a session with the daemon like any engine.

    python -m kvwarehouse.remote.worker

Not for use by hand: the daemon writes WorkerSettings to stdin, one line, then what it tells of
clears; its end is the daemon's end. stdout has lines too, all of them report.py's. It ends by a
bug, by a lost daemon or by a closed link with a code that the daemon reports; a store that fails is
a state and no end.

The main thread hears the daemon, and its end. One thread reports, one looks after the store, one
after clears, some put and some get: each has one object in memory at most. What they do is
StoreMember's.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, NoReturn

from kvwarehouse import core
from kvwarehouse.errors import TransportError
from kvwarehouse.remote import own_process
from kvwarehouse.remote.library_texts import first_line
from kvwarehouse.remote.report import (
    EXIT_FAILED,
    EXIT_HUNG,
    EXIT_LINK_CLOSED,
    LINE_BYTES_MAX,
    ToWorker,
    WorkerEvent,
    WorkerSettings,
    read_told,
)
from kvwarehouse.remote.state_events import StateEvents
from kvwarehouse.remote.store_member import StoreMember

_REPORT_EVERY_S: Final = 1.0
_ROUND_EVERY_S: Final = 1.0
_WAIT_S: Final = 1.0
_SESSION_TIMEOUT_S: Final = 10.0


class Worker:
    def __init__(self, settings: WorkerSettings, lines: int) -> None:
        """`lines`: the descriptor to say them to. Raises WarehouseError without a daemon."""
        self._lines = lines
        self._saying = threading.Lock()
        self._link = core.RemoteLink(settings.link_fd)
        session = core.NativeClient(settings.socket, True, _SESSION_TIMEOUT_S, 0.0)
        fleet = bytes.fromhex(settings.fleet_id)
        self._gets_link = core.RemoteGetLink(settings.get_link_fd) if settings.read else None
        self._member = StoreMember(
            settings,
            lambda run: session.pack_run(run, fleet),
            lambda run, body, within_s: session.fill_run(run, body, fleet, within_s),
            say=lambda line: self.say(line.to_line()),
        )
        self._puts = settings.puts if settings.write != "none" else 0
        self._gets = settings.gets
        self._state_events = StateEvents()

    def start(self) -> None:
        self.begin("kvw-remote-report", self._report)
        self.begin("kvw-remote-store", self._look_after)
        self.begin("kvw-remote-epochs", self._look_after_epochs)

    def hear(self, told: ToWorker) -> None:
        """A line of the daemon's."""
        self._member.epochs.tell(told)

    def say(self, line: bytes) -> None:
        """Waits for the daemon to read."""
        with self._saying:
            while line:
                line = line[os.write(self._lines, line) :]

    def begin(self, name: str, body: Callable[[], None]) -> None:
        """A thread that ends with the process, and the process with it."""
        threading.Thread(target=self.guard, args=(body,), name=name, daemon=True).start()

    def guard(self, body: Callable[[], None]) -> None:
        """What `body` fails by ends the process."""
        try:
            body()
        except BaseException as error:  # noqa: BLE001  a thread's edge
            self._end(error)

    def _end(self, error: BaseException) -> NoReturn:
        if isinstance(error, TransportError) and error.code == "link_closed":
            os._exit(EXIT_LINK_CLOSED)
        traceback.print_exception(error)
        event = {"error": type(error).__name__, "text": first_line(error)}
        try:
            self.say(WorkerEvent("remote_worker_failed", event).to_line())
        finally:
            os._exit(EXIT_FAILED)

    # --- what the threads do

    def _report(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            is_hung = self._member.is_hung  # before the report, which says what it ends for
            report = self._member.report()
            event = self._state_events.of(report)
            if event is not None:
                self.say(event.to_line())
            self.say(report.to_line())
            if is_hung:
                os._exit(EXIT_HUNG)  # its threads may stay: then the daemon leaves them behind
            time.sleep(_REPORT_EVERY_S)
        os._exit(0)

    def _look_after(self) -> None:
        self._member.open(time.sleep)
        working = False
        while True:
            self._member.round()
            if self._member.knows_its_filter and not working:
                self._begin_puts()
                self._begin_gets()
                working = True
            time.sleep(_ROUND_EVERY_S)

    def _look_after_epochs(self) -> None:
        while True:
            # Of two hosts that write above each other one is sooner.
            self._member.epochs.wait(random.uniform(0.2, 1.0) * _ROUND_EVERY_S)
            self._member.round_epochs()

    # --- puts

    def _begin_puts(self) -> None:
        if self._puts:
            self._link.ready(self._puts)
        for number in range(self._puts):
            self.begin(f"kvw-remote-put-{number}", self._put)

    def _put(self) -> None:
        own_process.give_way()
        while True:
            if not self._member.may_put:
                time.sleep(_WAIT_S)
                continue
            run = self._link.next(_WAIT_S)
            if run is not None:
                self._member.put(run)
                self._link.done(run)

    # --- gets

    def _begin_gets(self) -> None:
        link = self._gets_link
        if link is None:
            return
        link.ready(self._gets)
        self.begin("kvw-remote-reading", lambda: self._say_reading(link))
        for number in range(self._gets):
            self.begin(f"kvw-remote-get-{number}", lambda: self._get(link))

    def _say_reading(self, link: core.RemoteGetLink) -> None:
        while True:
            reading = self._member.reading()
            until_ns, first_byte_ns = (
                round(its_s * 1e9) for its_s in (reading.until_s, reading.first_byte_s)
            )
            link.state(until_ns, reading.bytes_per_s, first_byte_ns)
            time.sleep(_REPORT_EVERY_S)

    def _get(self, link: core.RemoteGetLink) -> None:
        while True:
            taken = self._member.take(lambda: link.next(_WAIT_S))
            if taken is not None:
                ended = self._member.get(taken)
                link.done(taken.run, ended.end, ended.pages)


def main() -> NoReturn:
    own_process.end_with_parent()
    own_process.keep_to_itself()
    lines = own_process.take_stdout()
    settings = WorkerSettings.from_line(sys.stdin.buffer.readline(LINE_BYTES_MAX + 1))
    worker = Worker(settings, lines)
    worker.start()
    worker.guard(lambda: _listen(worker))
    os._exit(0)  # threads of libraries wait for nobody


def _listen(worker: Worker) -> None:
    """Until the daemon's end."""
    while line := sys.stdin.buffer.readline(LINE_BYTES_MAX + 1):
        if len(line) <= LINE_BYTES_MAX and not line.endswith(b"\n"):
            return  # it has ended within one
        worker.hear(read_told(line))


if __name__ == "__main__":
    main()

"""The daemon: `serve` runs one in this process until it is told to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, TypeAlias

from kvwarehouse.config import Config
from kvwarehouse.daemon.lifecycle import Daemon
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.service_manager import ServiceManager
from kvwarehouse.errors import InternalError, WarehouseError

__all__ = ["ServiceManager", "serve"]


_SIGNALS_EVERY_S: Final = 0.1

_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
# A terminal that closes, a log rotation's hook, a habit of other daemons, a limit on processor
# time, a timer that somebody armed. Without a handler each ends the process where it stands.
_STRAY: Final = (
    signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM,
    signal.SIGPROF, signal.SIGIO, signal.SIGPWR, signal.SIGXCPU, signal.SIGSTKFLT,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)  # fmt: skip

Told: TypeAlias = SimpleQueue[int | None]
"""Numbers of signals, and None once the daemon's thread has ended."""


def serve(
    config: Config,
    *,
    on_ready: Callable[[], None] | None = None,
    engine: Any = None,
    manager: ServiceManager | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT, or another signal that would end the process and is not for a
    fault of it or a core dump, then drains; returns 0. A second SIGTERM or SIGINT exits at once.
    With --listen SIGHUP reads its tokens and certificate anew instead. What is ignored at the
    start, as nohup does, stays so, except SIGTERM and SIGINT.

    `on_ready` is called once everything answers, from another thread. Raises WarehouseError when
    the daemon cannot start; nothing is left behind then but what was there before; and StorageError
    `memory_lost` when somebody cut a file under it. Signals are taken over only on the main thread.
    `engine`: a double of kvwarehouse.core, for tests. `manager`: who hears how it goes."""
    # numpy is imported for the first call that needs it, and starts a thread for each core else.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if engine is None:
        from kvwarehouse import core as engine
    log = Log(config.log_format)
    log.event(Event.STARTING, name=config.name, version=engine.VERSION, pid=os.getpid())
    for text in config.warnings:
        log.event(Event.VARIABLE_UNKNOWN, text=text)
    before = os.umask(0o077)  # nothing this process makes is for others
    try:
        daemon = Daemon(config, log, engine, manager)
        _run(daemon, on_ready or (lambda: None))
    except WarehouseError as error:
        log.tell(everything=True)
        event = Event.ENDED if error.code == "memory_lost" else Event.START_REFUSED
        log.event(event, code=error.code, text=error.message)
        raise
    finally:
        os.umask(before)
    return 0


def _run(daemon: Daemon, on_ready: Callable[[], None]) -> None:
    """The daemon's work is on a thread of its own, because Python runs signal handlers only on the
    main one, and not while that waits in native code: a second signal must not wait for a flush."""
    failures: list[BaseException] = []
    told: Told = SimpleQueue()

    def work() -> None:
        try:
            daemon.run(on_ready)
        except BaseException as error:  # noqa: BLE001  the thread's edge; raised again below
            failures.append(error)
        finally:
            told.put(None)

    with _signals(told):
        thread = threading.Thread(target=work, name="daemon")
        thread.start()
        _heed(told, daemon)
        thread.join()
    if failures:
        error = failures[0]
        if isinstance(error, WarehouseError):
            raise error
        raise InternalError(f"the daemon failed: {error!r}; please report it") from error


@contextmanager
def _signals(told: Told) -> Iterator[None]:
    """Puts the signals that come into `told`. A handler runs between any two steps of this thread,
    also of another handler, and must not wait for a lock that these hold: SimpleQueue's put is made
    for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(number: int, _frame: FrameType | None) -> None:
        told.put(number)

    # One that is ignored stays so, and one whose handler is not Python's is another's, as a
    # profiler's.
    stray = [number for number in _STRAY if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, tell) for number in (*_ENDING, *stray)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _heed(told: Told, daemon: Daemon) -> None:
    """Does what signals ask for, until the daemon's thread has ended."""
    ending = False
    asked = 0  # by which signal to stop
    while True:
        try:
            # In slices: the kernel may give a signal to any thread, and a wait without an end on
            # this one would then not be interrupted for Python's handler to run.
            number = told.get(timeout=_SIGNALS_EVERY_S)
        except Empty:
            daemon.tell_manager()
            if daemon.is_stuck():
                os._exit(128 + asked)  # nothing of this start is served yet
            continue
        if number is None:
            return
        if number == signal.SIGHUP and daemon.reloads:
            daemon.request_reload()
            continue
        # Others come twice unasked: a hangup from the kernel and the shell, or beside SIGTERM.
        if number in _ENDING:
            if ending:
                os._exit(128 + number)  # whoever asks twice wants no more waiting
            ending = True
        asked = number
        daemon.request_stop(_name_of(number))


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # between the ends of those of real time
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"

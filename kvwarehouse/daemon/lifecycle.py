"""The daemon from its first check to its exit: builds the parts in order, serves, drains, takes
them down in the reverse order.

All work is on one thread of its own (`run`); `request_stop` and `request_reload` may be called from
any thread and from a signal handler. What start-up made is undone by the exit stack, also when
start-up fails half-way.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvwarehouse.addresses import is_loopback, split_address
from kvwarehouse.config import Config
from kvwarehouse.daemon import directories, identity
from kvwarehouse.daemon.admission import Connections, Refusals
from kvwarehouse.daemon.credentials import TcpCredentials
from kvwarehouse.daemon.directories import answers
from kvwarehouse.daemon.health import DaemonState, Health, Lifecycle
from kvwarehouse.daemon.http import HttpServer, StatusPages
from kvwarehouse.daemon.interceptors import CallInterceptor
from kvwarehouse.daemon.keeps import Keeps
from kvwarehouse.daemon.ledger import Ledger
from kvwarehouse.daemon.ledger_work import LedgerWork
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.path_watch import PathWatch
from kvwarehouse.daemon.problems import LOOK_EVERY_S
from kvwarehouse.daemon.servers import Servers
from kvwarehouse.daemon.service import WarehouseService
from kvwarehouse.daemon.service_manager import ServiceManager
from kvwarehouse.daemon.snapshot import Snapshots
from kvwarehouse.daemon.transfer import GrpcTransfer, Staging
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.daemon.watchdog import Watchdog
from kvwarehouse.daemon.watching import Watches
from kvwarehouse.errors import CapacityError, StorageError, WarehouseError
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.settings import OFF

if TYPE_CHECKING:
    from kvwarehouse.daemon.remote_clears import RemoteClears

_EVENTS_EVERY_S: Final = 1.0

CROWDED_S: Final = 0.1
"""Between two looks at connections while they may be beyond a host's share."""

_TOMBSTONES_EVERY_S: Final = 60.0
_KEEPS_EVERY_S: Final = 2.0
_SESSION_TIMEOUT_S: Final = 10.0

_LIVE_WITHIN_S: Final = 60.0
"""A core that did not answer for this long is not coming back: let the orchestrator restart us."""

_READY_WITHIN_S: Final = 15.0


@dataclass
class _Wait:
    """A step of the start that a disk can keep waiting, beyond any deadline of ours."""

    path: str
    begun_s: float
    said_s: float


class Daemon:
    """One run of a daemon. `engine`: the module kvwarehouse.core, or a double of it."""

    def __init__(
        self, config: Config, log: Log, engine: Any, manager: ServiceManager | None = None
    ) -> None:
        self._config = config
        self._log = log
        self._engine = engine
        self._manager = manager or ServiceManager()
        self._stop = threading.Event()
        self._drains = threading.Lock()  # state and core change together
        self._why = "stop"
        self._credentials: TcpCredentials | None = None
        self._reload_asked = False
        self._lifecycle = Lifecycle()
        self._lifecycle.listen(self._manager.follow)
        self._refusals = Refusals(log)
        self._connections = Connections(log, self._refusals)
        self._snapshots = Snapshots(
            config, engine.VERSION, self._lifecycle, self._refusals, self._connections
        )
        self._answered_at = time.monotonic()  # when the core last did
        self._core: Any = None
        self._recovered: dict[str, Any] = {}
        self._node = 0  # this daemon among those of its fleet
        self._warehouse: DaemonWarehouse | None = None
        self._keeps: Keeps | None = None
        self._clears: RemoteClears | None = None  # with a remote tier
        self._path_watch: PathWatch | None = None
        self._unheard: Callable[[], str] = lambda: ""  # why subscribers of KV events do not get in
        self._ledger_work = LedgerWork()
        self._watchdog = Watchdog(log)
        self._failure: StorageError | None = None
        self._wait: _Wait | None = None

    def request_stop(self, why: str = "stop") -> None:
        """`why`: for the log, of the first who asks."""
        if not self._stop.is_set():
            self._why = why
        self._stop.set()

    @property
    def reloads(self) -> bool:
        """Whether it has files that request_reload reads anew."""
        return bool(self._config.listen)

    def request_reload(self) -> None:
        """Tokens and certificate are read anew within about a second, while it serves."""
        self._reload_asked = True

    def is_stuck(self) -> bool:
        """Whether a stop was asked for, and the start waits for a disk for longer than
        --nvme-answer-s: nothing but the end of the process ends that. Says what it waits for, at
        ever longer intervals. For another thread, now and then."""
        wait, now_s = self._wait, time.monotonic()
        if wait is None or not self._is_long(wait):
            return False
        stuck = self._stop.is_set()
        if stuck or now_s - wait.begun_s >= 2 * wait.said_s:
            wait.said_s = now_s - wait.begun_s
            self._log.event(
                Event.START_WAITS,
                path=wait.path,
                waited_s=round(wait.said_s, 1),
                text="the start waits for this disk to answer"
                + ("; told to stop, it ends as it stands" if stuck else ""),
            )
        return stuck

    def tell_manager(self) -> None:
        """That the start goes on, unless a disk keeps it waiting for longer than --nvme-answer-s:
        the manager's own patience ends that. For another thread, often."""
        wait = self._wait
        if self._lifecycle.state is DaemonState.RECOVERING and not (wait and self._is_long(wait)):
            self._manager.start_goes_on()

    def _is_long(self, wait: _Wait) -> bool:
        return time.monotonic() - wait.begun_s >= self._config.nvme_answer_s

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until request_stop, then drains. Raises WarehouseError when it cannot start, and
        StorageError `memory_lost` when a file under it was cut while it served."""
        with ExitStack() as stack:
            self._start(stack)
            if not self._stop.is_set():
                self._lifecycle.advance(DaemonState.SERVING)
                self._log.event(Event.READY, **self._addresses())
                on_ready()
                self._serve()
            if self._failure is not None:
                raise self._failure  # without a flush: what it would write is not there
            self._drain()
            self._refusals.look()
            self._watchdog.tell()
        self._lifecycle.advance(DaemonState.STOPPED)
        self._log.tell(everything=True)
        self._log.event(Event.STOPPED)

    # --- start

    def _start(self, stack: ExitStack) -> None:
        path = self._config.fleet_secret
        fleet = FleetSecret.read(path) if path else None
        if self._config.remote:
            from kvwarehouse.remote.object_store import require_obstore

            require_obstore()
        self._detach_silent_disk()
        config, log = self._config, self._log
        self._own_directories(stack)
        options = self._core_options()
        self._engine.check_options(options)  # before the first file is written anew
        engine = self._engine
        directories.check_room(
            config, engine.index_bytes(options), engine.table_bytes(options), log
        )
        self._open_http(stack)
        try:
            ledger = self._recover(stack, fleet)
        except StorageError as error:
            if error.code != "nvme_no_answer":
                raise
            self._core = self._warehouse = None  # its locks are the next one's
            self._detach_disk(error.message)
            ledger = self._recover(stack, fleet)
        # Before the core listens: who has a session is sure that a daemon is there, and calls it.
        self._credentials = TcpCredentials(config, log, self._refusals) if config.listen else None
        interceptor = CallInterceptor(
            log, self._watchdog, self._refusals, self._connections, config.streams
        )
        servers = Servers(config, interceptor, self._credentials)
        stack.callback(servers.stop)
        self._start_core()
        self._open_service(stack, servers, ledger)
        self._open_remote(stack)
        self._path_watch = PathWatch(config, log, self._core, servers, self._unheard)
        stack.callback(self._path_watch.close)
        self._snapshots.path_watch = self._path_watch

    def _detach_silent_disk(self) -> None:
        """As if --nvme-dir had not been named: what the arena has is served. Raises StorageError
        where the arena is new: by itself it would be another warehouse's from then on."""
        config = self._config
        if not config.nvme_dir or answers(config.nvme_dir, config.nvme_answer_s):
            return
        reason = f"the disk gave no answer within {config.nvme_answer_s:g} s of the start"
        if not identity.is_in(config.arena_dir):
            raise StorageError(
                f"{reason}, and {config.arena_dir} is new, so that whose pages {config.nvme_dir} "
                "has is not known; start again when the disk answers, or without --nvme-dir and "
                "with another --arena-dir",
                code="nvme_no_answer",
                context={"path": config.nvme_dir},
            )
        self._detach_disk(reason)

    def _detach_disk(self, reason: str) -> None:
        self._log.event(
            Event.NVME_NO_ANSWER,
            path=self._config.nvme_dir,
            text=f"{reason}; it is not used until the next start, and what is cleared or evicted "
            "until then is noted beside the arena alone",
        )
        self._config = replace(self._config, nvme_dir="")
        self._snapshots.nvme_unanswered = reason

    def _own_directories(self, stack: ExitStack) -> None:
        config = self._config
        directories.prepare_for_socket(config.socket)
        owned = [config.socket + ".lock"]
        for path, flag in ((config.arena_dir, "--arena-dir"), (config.nvme_dir, "--nvme-dir")):
            if path:
                with self._waiting_for(path):
                    directories.prepare(path, flag)
                owned.append(directories.lock_path(path))
        for path in owned:
            with self._waiting_for(path):
                stack.callback(directories.Ownership(path).close)

    @contextlib.contextmanager
    def _waiting_for(self, *paths: str) -> Iterator[None]:
        self._wait = _Wait(" and ".join(paths), time.monotonic(), 0.0)
        try:
            yield
        finally:
            self._wait = None

    def _open_http(self, stack: ExitStack) -> None:
        config = self._config
        if config.http == OFF:
            return
        pages = StatusPages(self._snapshots.take, self._live_problem, self._ready_problem)
        server = HttpServer(config.http, pages)
        stack.callback(server.close)
        self._snapshots.http = server.address
        if not is_loopback(config.http):
            self._log.event(
                Event.HTTP_EXPOSED,
                address=server.address,
                text="other hosts may reach this address, and see counters of this daemon there "
                "without a token or TLS; keep all but probes and scrapers away with a firewall or "
                "a NetworkPolicy, or take a --http on 127.0.0.1",
            )

    def _recover(self, stack: ExitStack, fleet: FleetSecret | None) -> Ledger:
        """What an earlier daemon left. Raises StorageError "nvme_no_answer", with all of it closed
        again, where the disk stops answering meanwhile."""
        config, options = self._config, self._core_options()
        places = [path for path in (config.nvme_dir, config.arena_dir) if path]
        expected = _has_pages(config)
        with ExitStack() as opened:
            with self._waiting_for(*places):
                who = identity.establish(places, self._log, fleet)
                ledger = Ledger(
                    places,
                    who.warehouse_id,
                    self._log,
                    expected=expected,
                    answer_s=config.nvme_answer_s,
                )
            opened.callback(ledger.close)
            opened.callback(self._ledger_work.wait, config.nvme_answer_s)
            if config.remote:
                from kvwarehouse.daemon.remote_clears import RemoteClears

                self._clears = RemoteClears(places, who.warehouse_id, ledger, self._log)
                self._clears.finish()
            self._snapshots.fleet_id = who.fleet.fleet_id.hex()
            options.warehouse_id = who.warehouse_id
            options.secret = who.secret
            if config.remote:
                options.remote_write = config.remote_write if config.remote_write != "none" else ""
                options.remote_read = config.remote_read == "on"
                options.remote_fleet = who.fleet.fleet_id
            self._node = int.from_bytes(who.warehouse_id[:8], "little")
            options.epoch = ledger.epoch
            options.epoch_floor = ledger.floor
            options.log_end = ledger.log_end
            if options.nvme_bytes_per_day:
                balance = ledger.write_balance()
                options.nvme_bytes_left = (
                    balance.left_at(time.time_ns(), options.nvme_bytes_per_day)
                    if balance
                    else options.nvme_bytes_per_day
                )
            self._core = self._engine.Core(options)
            self._warehouse = DaemonWarehouse(self._core, ledger, self._log, self._clears)
            self._warehouse.restore()
            opened.callback(self._stop_core)
            self._recovered = self._core.recover()
            self._keeps = Keeps(self._core, ledger, self._warehouse, self._log)
            self._keeps.restore()
            ledger.adopt_epoch(int(self._recovered.get("epoch_seen", 0)))
            ledger.keep_ahead(self._core.log_end())
            stack.push(opened.pop_all())
        return ledger

    def _start_core(self) -> None:
        self._core.start()
        self._answered_at = time.monotonic()
        self._log.core_events(self._core.events())
        self._log.event(Event.RECOVERED, **self._recovered)

    def _core_options(self) -> Any:
        """What the configuration says: all but whose warehouse it is."""
        config, options = self._config, self._engine.CoreOptions()
        options.socket_path = config.socket
        options.arena_dir = config.arena_dir
        options.dram_bytes = config.dram_bytes
        options.nvme_dir = config.nvme_dir
        options.nvme_capacity_bytes = config.nvme_capacity_bytes
        options.nvme_segment_bytes = config.nvme_segment_bytes
        options.hbm_bytes = config.hbm_bytes
        options.hbm_device = config.device
        options.index_pages = config.index_pages
        options.policy = config.policy
        options.io_engine = config.io_engine
        options.limbo_after_s = config.limbo_after_s
        options.grace_s = config.grace_s
        options.flush_interval_s = config.flush_interval_s
        options.nvme_retry_s = config.nvme_retry_s
        options.nvme_answer_s = config.nvme_answer_s
        options.write_queue_bytes = config.write_queue_bytes
        options.keep_bytes = config.dram_bytes * config.keep_percent // 100
        options.nvme_bytes_per_day = config.nvme_bytes_per_day
        return options

    def _open_service(self, stack: ExitStack, servers: Servers, ledger: Ledger) -> None:
        assert self._warehouse is not None
        assert self._keeps is not None
        config = self._config
        staging = Staging(config.staging_bytes)
        session = self._engine.NativeClient(config.socket, True, _SESSION_TIMEOUT_S)
        stack.callback(session.close)
        self._snapshots.attach(self._warehouse, ledger, staging)
        watches = Watches(self._warehouse)
        service = WarehouseService(
            self._warehouse,
            GrpcTransfer(session, staging, self._engine.Regions),
            self._snapshots,
            watches,
            self._keeps,
            self._ask_drain,
        )
        self._open_events(stack)
        health = Health()
        self._lifecycle.listen(health.follow)
        stack.callback(servers.stop)  # before what serves its calls
        stack.callback(watches.end)  # before it: they would use up the grace of the others
        self._snapshots.listen = servers.listen_address
        if config.listen:
            self._connections.port = split_address(servers.listen_address)[1]
        servers.start(service, health)

    def _open_events(self, stack: ExitStack) -> None:
        if not self._config.kv_events:
            return
        # ZeroMQ is loaded only where it is wanted: it brings threads and memory of its own.
        from kvwarehouse.daemon.event_stream import EventStream

        assert self._warehouse is not None
        stream = EventStream(self._config, self._warehouse, self._log)
        stack.callback(stream.stop)
        self._snapshots.kv_events = stream.status
        self._unheard = lambda: stream.unreachable
        stream.start()

    def _open_remote(self, stack: ExitStack) -> None:
        if not self._config.remote:
            return
        from kvwarehouse.daemon.remote_tier import RemoteTier

        assert self._clears is not None
        assert self._warehouse is not None
        self._clears.start(self._core, self._warehouse)
        stack.callback(self._clears.stop)
        tier = RemoteTier(
            self._config, self._log, self._core, self._snapshots.fleet_id, self._node, self._clears
        )
        stack.callback(tier.stop)
        self._snapshots.remote = tier.status
        tier.start()

    def _addresses(self) -> dict[str, object]:
        return {
            "socket": self._config.socket,
            "grpc": f"unix:{self._config.grpc_socket}",
            "listen": self._snapshots.listen,
            "http": self._snapshots.http,
            "pid": os.getpid(),
        }

    # --- service

    def _serve(self) -> None:
        tombstones_at = time.monotonic() + _TOMBSTONES_EVERY_S
        problems_at = keeps_at = time.monotonic()
        while self._rest():
            self._reload()
            self._watch_core(self._drain_events)
            assert self._warehouse is not None
            if time.monotonic() >= tombstones_at and not self._ledger_work.is_busy:
                self._watch_core(partial(self._have_written, self._warehouse.tend_tombstones))
                tombstones_at = time.monotonic() + _TOMBSTONES_EVERY_S
            if not self._ledger_work.is_busy:
                self._watch_core(partial(self._have_written, self._warehouse.take_quarantined))
            if time.monotonic() >= keeps_at and not self._ledger_work.is_busy:
                assert self._keeps is not None
                self._watch_core(partial(self._have_written, self._keeps.tend))
                keeps_at = time.monotonic() + _KEEPS_EVERY_S
            if not self._live_problem():
                self._manager.alive()
            self._refusals.look()
            self._watchdog.tell()
            self._log.tell()
            assert self._path_watch is not None
            self._path_watch.look()
            if time.monotonic() >= problems_at:
                self._watch_core(self._snapshots.take)
                problems_at = time.monotonic() + LOOK_EVERY_S

    def _rest(self) -> bool:
        """Until the next round; False once it is to end. Looks at connections as often as they
        need it."""
        until = time.monotonic() + _EVENTS_EVERY_S
        while True:
            left_s = until - time.monotonic()
            if self._stop.wait(min(left_s, CROWDED_S) if self._connections.crowded else left_s):
                return False
            self._connections.look()
            if time.monotonic() >= until:
                return True

    def _reload(self) -> None:
        if self._reload_asked and self._credentials is not None:
            self._reload_asked = False  # before it reads: who asks meanwhile has changed more
            self._manager.reloading()
            self._credentials.reload()
            self._manager.reloaded()

    def _have_written(self, ask: Callable[[], Callable[[], object] | None]) -> None:
        """What the core says to `ask`: that is its answer, and a disk that keeps the ledger waiting
        is no silence of it."""
        self._ledger_work.begin(ask())

    def _drain_events(self) -> None:
        events = self._core.events()
        self._log.core_events(events)
        for name, fields in events:
            if name == "memory_lost" and fields.get("reason") == "cut":
                self._failure = _cut(fields["file"], self._config.arena_dir)
                self._stop.set()

    def _watch_core(self, ask: Callable[[], object]) -> None:
        """A core that does not answer is logged once, and shows in the probes."""
        answering = not self._silence()
        try:
            ask()
        except WarehouseError as error:
            if answering:
                self._log.event(Event.CORE_UNRESPONSIVE, code=error.code, text=error.message)
            return
        self._answered_at = time.monotonic()

    def _live_problem(self) -> str:
        silent_s = time.monotonic() - self._answered_at
        if self._lifecycle.state is DaemonState.SERVING and silent_s > _LIVE_WITHIN_S:
            return f"the core has not answered for {silent_s:.0f} s"
        return ""

    def _ready_problem(self) -> str:
        state = self._lifecycle.state
        if state is not DaemonState.SERVING:
            return state.value
        return self._silence() or (self._path_watch.unreachable if self._path_watch else "")

    def _silence(self) -> str:
        silent_s = time.monotonic() - self._answered_at
        return "" if silent_s < _READY_WITHIN_S else f"the core is silent for {silent_s:.0f} s"

    def _ask_drain(self, on: bool, who: str) -> bool:
        """Of a Drain, or with on=False of an Undrain; whether that was a change. `who`: as gRPC
        calls who asked. Raises CapacityError (code "ending") where the daemon's own drain stays."""
        assert self._warehouse is not None
        with self._drains:
            if on:
                changed = self._lifecycle.advance(DaemonState.DRAINING)
                self._warehouse.drain()
            elif self._stop.is_set():
                raise CapacityError(
                    "this daemon ends and takes no more stores; the next one does", code="ending"
                )
            else:
                self._warehouse.undrain()
                changed = self._lifecycle.resume()
            if changed:
                self._log.event(Event.DRAINING if on else Event.UNDRAINED, why="asked", who=who)
        return changed

    # --- end

    def _drain(self) -> None:
        """No new stores, then a flush with a bound."""
        assert self._warehouse is not None
        self._manager.stopping(self._config.drain_timeout_s)
        try:
            with self._drains:
                if self._lifecycle.advance(DaemonState.DRAINING):
                    self._log.event(Event.DRAINING, why=self._why)
                self._warehouse.drain()
            flushed = self._warehouse.flush(self._config.drain_timeout_s)
            self._warehouse.bury_quarantined()
        except WarehouseError as error:
            self._log.event(Event.CORE_UNRESPONSIVE, code=error.code, text=error.message)
            return
        self._log.event(
            Event.FLUSHED,
            flushed=flushed.flushed,
            not_admitted=flushed.not_admitted,
            pending=flushed.pending,
        )

    def _stop_core(self) -> None:
        # It may not have started, or not answer: stop() is what matters.
        with contextlib.suppress(WarehouseError):
            self._log.core_events(self._core.events())
            if self._keeps and (write := self._keeps.tend()):
                write()
            if self._warehouse:
                self._warehouse.note_writes()
        assert self._warehouse is not None
        self._warehouse.stop()


def _has_pages(config: Config) -> bool:
    """Whether an earlier daemon left pages: then a ledger is expected too."""
    places = [os.path.join(config.arena_dir, "arena")]
    if config.nvme_dir:
        places.append(os.path.join(config.nvme_dir, "segments"))
    return any(os.path.exists(place) for place in places)


def _cut(file: str, arena_dir: str) -> StorageError:
    """What ends a daemon whose `file` was cut. A start refuses two of them, and makes others anew
    from these."""
    if file in ("arena", "slots"):
        advice = "move that directory away and start again; what was flushed to NVMe is kept"
    else:
        advice = "start again, which makes it anew and has the pages in DRAM"
    return StorageError(
        f"somebody has cut the file {file} in {arena_dir} while it was served: {advice}",
        code="memory_lost",
    )

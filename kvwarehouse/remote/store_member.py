"""This host as a member of its fleet, in the store: opens it, goes its rounds there, puts and gets
runs, and says how all of that is.

One thread calls `open` and `round`, another `round_epochs`, which wait for the store; any thread
calls the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwarehouse import core
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.rate_limit import RateLimit
from kvwarehouse.remote import store_state
from kvwarehouse.remote.damaged_objects import DamagedObjects
from kvwarehouse.remote.epochs import Epochs
from kvwarehouse.remote.fleet_store import FleetStore
from kvwarehouse.remote.gets import Fill, GetEnded, Gets, GetSource, Taken
from kvwarehouse.remote.late_presence import LatePresence
from kvwarehouse.remote.names import FleetNames
from kvwarehouse.remote.object_store import ObjectStore, StoreSettings, open_store
from kvwarehouse.remote.puts import Destination, Puts
from kvwarehouse.remote.report import FromWorker, WorkerReport, WorkerSettings
from kvwarehouse.remote.store_gate import StoreGate, StoreProblem

if TYPE_CHECKING:
    from kvwarehouse.core import PresenceFile, RunToGet, RunToPut

_FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 30.0

_LATE: Final = 1.5
"""Times a deadline: a call that is late by as much is on a folder that hangs."""

_OPENS_WITHIN_S: Final = 10.0
"""A folder on a mount that hangs takes longer: for ever."""

_LATELY_S: Final = 15.0
"""How long a round that failed is a reason for what else has none. What goes on to fail is tried
again sooner, but for a listing of all objects."""

HUNG_S: Final = 60.0
"""A call that takes so long, and more than twice its deadline, is not coming back. Over a network
calls end by their deadline."""


def _boot_s() -> float:
    """Monotonic, and a host that slept has not: what it listed before is old."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class _Opened:
    store: ObjectStore
    fleet: FleetStore
    puts: Puts
    gets: Gets


@dataclass(frozen=True)
class ReadingState:
    """Until when, by the boot clock, lookups may count on the store (0: they may not), and how fast
    it was lately (0: not known)."""

    until_s: float = 0.0
    bytes_per_s: int = 0
    first_byte_s: float = 0.0


class StoreMember:
    """`pack`: makes the object of a run; `fill`: stores one's pages here. `say`: to the daemon.
    `clock`: seconds of the core's clock, CLOCK_BOOTTIME."""

    def __init__(
        self,
        settings: WorkerSettings,
        pack: Callable[[RunToPut], Any],
        fill: Fill,
        clock: Callable[[], float] = _boot_s,
        *,
        say: Callable[[FromWorker], None],
    ) -> None:
        self._settings, self._clock = settings, clock
        self._pack, self._fill = pack, fill
        self._names = FleetNames(bytes.fromhex(settings.fleet_id))
        self.epochs: Final = Epochs(self._names, settings.node, say, clock)
        self._presence = LatePresence(self._new_presence)
        self._gate, self._get_gate = StoreGate(clock), StoreGate(clock)
        self._opened: _Opened | None = None
        self._tried_s = clock()  # to open it
        self._problem = ""  # why it is not open
        self._may_ask = False
        self._round_problem: StoreProblem | None = None  # what failed last in a round
        self._round_failed_s = 0.0
        self._epochs_problem = ""  # why the last round of clears did not go through

    def open(self, sleep: Callable[[float], None]) -> None:
        """Tries until it is: a folder may be mounted later, a file be mended."""
        wait_s = _FIRST_RETRY_S
        while self._opened is None:
            try:
                self._tried_s = self._clock()
                self._opened = self._open()
            except UsageError as error:
                self._problem = error.message
                sleep(wait_s)
                wait_s = min(2 * wait_s, _LAST_RETRY_S)

    @property
    def knows_its_filter(self) -> bool:
        """The file `presence` is there, and its days are right."""
        return self._presence.is_open

    @property
    def may_put(self) -> bool:
        """Runs had better wait with the daemon where not: the store fails, or does not know this
        host yet."""
        opened = self._opened
        return opened is not None and self._may_ask and not opened.store.failing()

    def round(self) -> None:
        """What is due in the store. A store that fails is a state."""
        assert self._opened is not None
        fleet = self._opened.fleet
        was_seen = fleet.facts().is_seen  # a round gives those their part that are seen before it
        failure = fleet.round()
        if failure is not None:
            self._round_failed_s = self._clock()
            self._round_problem = StoreProblem(failure.code, failure.message)
        facts = fleet.facts()
        self._may_ask = was_seen and facts.listed_ago_s >= 0 and not facts.clock_jump_s
        self._probe(self._opened.store)
        self._probe_get(self._opened.store)

    def reading(self) -> ReadingState:
        """Called about once a second."""
        opened = self._opened
        if opened is None:
            return ReadingState()
        refused = self._get_gate.problem is not None
        serving = self.knows_its_filter and not refused and not opened.store.failing()
        figures = opened.gets.figures()
        return ReadingState(
            self.epochs.fresh_until_s if serving else 0.0, figures.bytes_per_s, figures.first_byte_s
        )

    def round_epochs(self) -> None:
        """What is due of clears. A store that fails is a state."""
        opened = self._opened
        if opened is None:
            return
        heeds = bool(opened.fleet.facts().put_if_absent)
        try:
            self.epochs.round(opened.store, opened.fleet.now_ms, put_if_absent=heeds)
            self._epochs_problem = ""
        except TransportError as error:
            self._epochs_problem = error.message

    @property
    def is_hung(self) -> bool:
        """Nothing but the end of the process helps."""
        opened = self._opened
        if opened is None:
            return self._clock() - self._tried_s > HUNG_S
        return opened.store.longest_call_s() > max(HUNG_S, 2 * self._longest_deadline_s)

    @property
    def _longest_deadline_s(self) -> float:
        return max(self._settings.get_deadline_s, self._settings.put_deadline_s)

    def put(self, run: RunToPut) -> str:
        """One of PUT_RESULTS. Raises what packing raises."""
        assert self._opened is not None
        return self._opened.puts.put(run)

    def take(self, next_run: Callable[[], RunToGet | None]) -> Taken | None:
        """See Gets.take."""
        assert self._opened is not None
        return self._opened.gets.take(next_run)

    def get(self, taken: Taken) -> GetEnded:
        """Raises what filling raises."""
        assert self._opened is not None
        return self._opened.gets.get(taken)

    def report(self) -> WorkerReport:
        opened = self._opened
        state, reason = self._state()
        if opened is None:
            return WorkerReport(state, reason)
        # A put counts as one once all else has heard of it, so what is counted is read first.
        puts = opened.puts.results
        facts, figures = opened.fleet.facts(), opened.gets.figures()
        epochs_ago_s = self.epochs.listed_ago_s
        return WorkerReport(
            state,
            reason,
            used_bytes=facts.used_bytes,
            objects=facts.objects,
            objects_max=self._settings.objects,
            nodes=facts.nodes,
            puts=puts,
            put_bytes=opened.puts.put_bytes,
            gets=opened.gets.ends,
            get_bytes=opened.gets.get_bytes,
            damaged=opened.gets.damaged,
            read_bytes_per_s=figures.bytes_per_s,
            first_byte_ms=figures.first_byte_s * 1e3,
            deleted_objects=facts.deleted_objects,
            breaker_opened=opened.store.breaker.times_opened,
            listed_ago_s=facts.listed_ago_s,
            epochs_ago_s=-1.0 if epochs_ago_s is None else epochs_ago_s,
        )

    def _state(self) -> tuple[str, str]:
        opened = self._opened
        if opened is None:
            return self._state_before()
        problem = self._gate.problem or self._get_gate.problem or opened.fleet.problem
        if opened.store.longest_call_s() > _LATE * self._longest_deadline_s:
            return store_state.HANGS
        if opened.store.failing():
            return store_state.failing_state(opened.store.last_failure)
        if problem is not None:
            return store_state.gate_state(problem)
        facts = opened.fleet.facts()
        state, reason = store_state.fleet_state(
            facts, self._settings.capacity_bytes, may_ask=self._may_ask
        )
        failed = self._failed_lately(was_listed=facts.listed_ago_s >= 0)
        if state == "starting" and failed is not None:
            return store_state.gate_state(failed)  # it does not start, for that reason
        if not reason and not self.epochs.is_fresh:  # what is put is true all the same
            reason = self._epochs_problem
        if not reason and failed is not None:
            reason = failed.text
        return state, reason

    def _failed_lately(self, *, was_listed: bool) -> StoreProblem | None:
        """What keeps the fleet's store from being listed at all is true until it is."""
        is_late = self._clock() - self._round_failed_s > _LATELY_S
        return None if was_listed and is_late else self._round_problem

    def _state_before(self) -> tuple[str, str]:
        if self._problem:
            return "failing", self._problem
        if self._clock() - self._tried_s > _OPENS_WITHIN_S:
            return store_state.HANGS
        return "starting", "the store is being opened"

    # --- the store

    def _open(self) -> _Opened:
        settings = self._settings
        store = open_store(StoreSettings.of(settings.url, settings))
        fleet = FleetStore(store, self._names, self._presence, settings, settings.node, self._clock)
        damaged = DamagedObjects()
        to = Destination(
            store,
            self._names,
            fleet,
            self._presence,
            damaged,
            lambda: bool(fleet.facts().put_if_absent),
        )
        rate = RateLimit(settings.write_bytes_per_s or None)
        source = GetSource(
            store, self._names, self._presence.remove, damaged, lambda: self.epochs.fresh_until_s
        )
        gets = Gets(source, self._fill, self._get_gate, self._clock)
        return _Opened(store, fleet, Puts(to, self._pack, self._gate, rate), gets)

    def _new_presence(self, today: int) -> PresenceFile:
        settings = self._settings
        return core.PresenceFile(
            settings.presence_path,
            bytes.fromhex(settings.fleet_id),
            settings.objects,
            settings.ttl_days + 1,
            today,
        )

    def _probe(self, store: ObjectStore) -> None:
        """A small put, where nothing else would find out that a store works again."""
        refused = self._gate.problem is not None and self._gate.problem.code == "remote_refused"
        if not (store.failing() or (refused and self._gate.admit())):
            return
        name = f"{self._names.probes_prefix}{self._settings.node:016x}"
        with contextlib.suppress(TransportError):
            store.put(name, b"")
            if refused:
                self._gate.succeeded()
            store.delete([name])

    def _probe_get(self, store: ObjectStore) -> None:
        """Nobody asks for anything while the store lets this host read nothing."""
        if self._get_gate.problem is None or not self._get_gate.admit():
            return
        with contextlib.suppress(TransportError):
            store.get(self._names.node(self._settings.node), 0, 1)
            self._get_gate.succeeded()

"""Clears over the hosts of a fleet, as this daemon has them: which epoch of the remote store each
namespace is of, if any, and which clears of its own the store does not have yet.

What holds, whatever ends at whatever step:

- A namespace has a fleet's epoch only while everything that this host has of it was stored after
  all clears up to that epoch (`Applied`), and the host owes no marker of a clear of its own.
  Objects are put under it at once, which is true of them at any time; they are read once a listing
  says that it is the fleet's still, and the worker has heard that we know (Epochs.is_fresh).
- A clear here is owed, durably, before it is in the ledger: a crash between leaves a marker too
  many, which clears others once more, and never one too few.
- What others have cleared is noted as applied, for the clear epoch that comes next, before that
  epoch is in the ledger. Where the ledger's is below what is noted, a crash has come between: it is
  cleared anew. Where it is above, or was cleared before the host had the tier, a marker is owed.
- A marker of ours that was written above others that this host did not know counts as another
  host's: what was stored here since our clear may be older than theirs.

One thread does all this, in passes: from what the worker has listed, what it has answered, the
ledger and the file. `note`, `record`, `added` and `forget` are called with the warehouse's changes
locked; any thread calls the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvwarehouse.daemon import remote_clears_file as file
from kvwarehouse.daemon.ledger import LOST, Ledger, NamespaceRecord
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.remote_clears_file import Applied, ClearsState
from kvwarehouse.errors import InternalError, WarehouseError
from kvwarehouse.remote.names import EVERYTHING
from kvwarehouse.remote.report import (
    EPOCHS_PER_LINE,
    ClearTold,
    ClearWritten,
    EpochsFound,
    EpochsHeard,
    EpochsKnown,
    ToWorker,
)

if TYPE_CHECKING:
    from kvwarehouse.daemon.warehouse import DaemonWarehouse

LISTED_MAX: Final = 1 << 16
"""Namespaces of a fleet that have an epoch; the worker has the same bound."""
OWED_MAX: Final = 1 << 14
"""Markers. Beyond it no namespace is forgotten: what is known is owed once."""
RETRY_S: Final = 1.0
SAVE_AGAIN_S: Final = 30.0
STOPS_WITHIN_S: Final = 5.0

_TOLD_MAX: Final = 256  # that wait for their answers


class RemoteClears:
    """`directories`: those of the ledger."""

    def __init__(
        self, directories: Sequence[str], warehouse_id: bytes, ledger: Ledger, log: Log
    ) -> None:
        """Reads what is known, and clears in the ledger what a crash has left uncleared: before the
        core is told of it. Raises StorageError for a file of a newer version."""
        self._directories, self._warehouse_id = directories, warehouse_id
        self._ledger, self._log = ledger, log
        self._change = threading.Condition()
        self._saving = threading.Lock()
        self._unsaved = ""  # why the file is older than what is known
        self._is_changed = False  # and is to be written
        self._state = self._read()
        self._served: dict[bytes, Applied] = {}
        self._listed: dict[bytes, int] = {}
        self._is_listed = False
        # The fleet's epochs that are noted, perhaps, while the core is yet to have heard of them.
        self._uncleared: dict[bytes, int] = {}
        # Of the worker that runs.
        self._number = 0
        self._tell: Callable[[ToWorker], bool] | None = None
        self._told: dict[bytes, int] = {}
        self._answers: list[ClearWritten] = []
        self._serial = 0  # of a listing that it is to be told was heard
        self._work, self._ends = True, False
        self._failed = ""  # how the thread ended that must not end
        self._core: Any = None
        self._warehouse: DaemonWarehouse | None = None
        self._thread = threading.Thread(target=self._run, name="kvw-remote-clears", daemon=True)

    def _read(self) -> ClearsState:
        state, damaged = file.read(self._directories, self._warehouse_id)
        for each in damaged:
            self._log.event(
                Event.REMOTE_CLEARS_LOST, path=each.path, reason=each.reason, kept=each.kept
            )
        state = state or ClearsState()  # lost, or there never was one: any clear may be owed
        for record in self._ledger.namespaces():
            name = record.space.id
            is_unknown = name not in state.applied and record.clear_epoch > state.floor
            if is_unknown and not state.owes(name):
                state.owed[name] = record.clear_epoch
            _owe_unnoted(state, record)
        return state

    def finish(self) -> None:
        """What a crash has left half done. Before anybody is told the ledger's epoch."""
        half = {
            record.space.id: applied.epoch
            for record in self._ledger.namespaces()
            if (applied := self._state.applied.get(record.space.id))
            and record.clear_epoch < applied.clear_epoch
        }
        if half:
            epoch = self._ledger.epoch + 1
            self._state.applied.update(
                (name, Applied(of_fleet, epoch)) for name, of_fleet in half.items()
            )
        self._save()
        if half:
            self._ledger.raise_epoch(half)

    def start(self, core: Any, warehouse: DaemonWarehouse) -> None:
        """Returns at once. The core runs."""
        self._core, self._warehouse = core, warehouse
        self._thread.start()

    def stop(self) -> None:
        """Before the core stops. Waits for STOPS_WITHIN_S at most."""
        with self._change:
            self._ends = True
            self._change.notify_all()
        if self._thread.ident is not None:
            self._thread.join(STOPS_WITHIN_S)

    @property
    def owed(self) -> int:
        """Clears of this host that the store does not have yet."""
        return len(self._state.owed)

    @property
    def failed(self) -> str:
        """Why nothing is done any more, which only a bug can bring about. "": it goes on."""
        return self._failed

    @property
    def may_forget(self) -> bool:
        return len(self._state.owed) < OWED_MAX

    def is_owed(self, name: bytes) -> bool:
        return self._state.owes(name)

    # --- of the warehouse, which has locked its changes

    def note(self, names: Iterable[bytes], clear_epoch: int) -> bool:
        """They are about to be cleared under that epoch, the ledger's next. Returns whether the
        file has it."""
        with self._change:
            for name in names:
                if name == EVERYTHING:  # one marker for all that is owed
                    self._state.owed.clear()
                    self._served.clear()
                self._state.owed[name] = clear_epoch
                self._served.pop(name, None)
        return self._save()

    def record(self, applied: Mapping[bytes, Applied]) -> None:
        """What is about to be so. Where the file refuses it, a restart clears once more."""
        with self._change:
            self._state.applied.update(applied)
        self._save()

    def added(self, record: NamespaceRecord, pages: int) -> int:
        """A namespace that was not known. Where no pages are here of it, nothing is older than what
        the fleet has cleared; else returns the fleet's epoch, which it has to follow, or 0."""
        with self._change:
            of_fleet = self._of_fleet(record.space.id)
            if pages == 0 and self._is_listed:
                self._state.applied[record.space.id] = Applied(of_fleet, record.clear_epoch)
                self._is_changed = True
        self.wake()
        return of_fleet if pages else 0

    def forget(self, names: Iterable[bytes]) -> None:
        """They are no more; what is owed of them still is."""
        with self._change:
            for name in names:
                self._state.applied.pop(name, None)
                self._served.pop(name, None)
            self._is_changed = True
        self.wake()

    def wait(self, names: Collection[bytes], timeout_s: float) -> str:
        """Whether their markers are there ("done"), or the store did not take them in that time
        ("owed")."""
        with self._change:
            # A clear of all that came meanwhile has taken over what was owed of one.
            def is_owed() -> bool:
                return any(self._state.owes(name) for name in names)

            self._change.wait_for(lambda: self._tell is None or not is_owed(), timeout_s)
            return "owed" if is_owed() else "done"

    # --- of what looks after the worker

    def begin(self, number: int) -> None:
        """The worker of that number is about to be started; none other is heard from now on."""
        with self._change:
            self._number, self._serial, self._tell = number, 0, None
            self._told.clear()
            self._answers.clear()

    def attach(self, tell: Callable[[ToWorker], bool]) -> None:
        """It runs. `tell` waits for it for a while; False: it does not listen."""
        with self._change:
            known = [
                (name.hex(), applied.epoch)
                for name, applied in self._state.applied.items()
                if applied.epoch
            ]
        for at in range(0, len(known), EPOCHS_PER_LINE):  # before clears: markers go above it
            tell(EpochsKnown(dict(known[at : at + EPOCHS_PER_LINE])))
        with self._change:
            self._tell = tell
        self.wake()

    def detach(self) -> None:
        """There is no worker."""
        self.begin(0)
        self.wake()

    def heard(self, number: int, line: EpochsFound | ClearWritten) -> None:
        """What the worker of that number says. Raises InternalError for what it cannot have to
        say."""
        with self._change:
            if number != self._number:
                return
            if isinstance(line, ClearWritten):
                # An answer to what is owed no more takes no other's place.
                is_awaited = self._told.get(bytes.fromhex(line.namespace)) == line.clear_epoch
                if is_awaited and len(self._answers) < _TOLD_MAX:
                    self._answers.append(line)
            else:
                self._found(line)
            self._work = True
            self._change.notify_all()

    def _found(self, line: EpochsFound) -> None:
        for text, epoch in line.epochs.items():
            name = bytes.fromhex(text)
            self._listed[name] = max(epoch, self._listed.get(name, 0))
        of_all = self._listed.get(EVERYTHING, 0)  # what is below is not asked for any more
        self._listed = {
            name: epoch
            for name, epoch in self._listed.items()
            if epoch > of_all or name == EVERYTHING
        }
        if len(self._listed) > LISTED_MAX:
            raise InternalError(
                f"the worker has told of epochs of over {LISTED_MAX} namespaces", code="remote_line"
            )
        if line.left == 0:
            self._is_listed, self._serial = True, line.serial

    # --- the thread

    def _run(self) -> None:
        try:
            failing = False
            while self._rest():
                try:
                    self._pass()
                    failing = False
                except WarehouseError as error:
                    if not failing:
                        self._log.event(
                            Event.CORE_UNRESPONSIVE, code=error.code, text=error.message
                        )
                    failing = True
                    self._sleep(RETRY_S)
                    self.wake()
        except Exception as error:  # noqa: BLE001  a thread's edge
            # What others clear from now on would not reach this host: the tier, which looks after
            # the worker, sees this and ends it (remote_tier.py).
            self._failed = f"{type(error).__name__}: {error}"
            self._log.event(Event.REMOTE_STOPPED, error=type(error).__name__, text=str(error))

    def _rest(self) -> bool:
        """Until there is something to do; False: it ends."""
        with self._change:
            self._change.wait_for(
                lambda: self._work or self._ends, SAVE_AGAIN_S if self._unsaved else None
            )
            self._work = False
            return not self._ends

    def _sleep(self, time_s: float) -> None:
        with self._change:
            self._change.wait_for(lambda: self._ends, time_s)

    def wake(self) -> None:
        with self._change:
            self._work = True
            self._change.notify_all()

    def _pass(self) -> None:
        assert self._warehouse is not None
        with self._change:
            answers, self._answers = self._answers, []
        for answer in answers:
            self._take(answer)
        self._tell_owed()
        with self._change:
            serial, tell = self._serial, self._tell  # of this listing is what is acted upon now
            stale = self._stale()
        for name in stale:
            self._served.pop(name, None)
            self._core.stop_remote(name)
        self._uncleared.update(stale)
        if self._uncleared:
            self._warehouse.clear_for_fleet(self._uncleared)
            self._uncleared.clear()
        if serial and tell is not None:  # from here on no reader here finds what is older
            tell(EpochsHeard(serial))
            with self._change:
                if self._serial == serial:
                    self._serial = 0
        self._serve()
        if self._is_changed or self._unsaved:
            self._save()
        with self._change:
            self._change.notify_all()  # who waits for an answer

    def _take(self, answer: ClearWritten) -> None:
        name = bytes.fromhex(answer.namespace)
        with self._change:
            if self._told.get(name) == answer.clear_epoch:
                del self._told[name]
            self._listed[name] = max(answer.epoch, self._listed.get(name, 0))
            clear_epoch = self._state.owed.get(name)
            if clear_epoch is None or answer.clear_epoch < clear_epoch:
                return  # it was cleared again meanwhile
            del self._state.owed[name]
            self._is_changed = True
            for record in self._ledger.namespaces():
                if name in (record.space.id, EVERYTHING):
                    self._advance(record, clear_epoch, answer)

    def _advance(self, record: NamespaceRecord, clear_epoch: int, answer: ClearWritten) -> None:
        """What is here of it was stored after that clear; after all that are below, if this host
        has applied them. Else it is stale now."""
        applied = self._applied(record)
        is_cleared = record.clear_epoch >= max(clear_epoch, applied.clear_epoch)
        if is_cleared and answer.below <= applied.epoch < answer.epoch:
            self._state.applied[record.space.id] = Applied(answer.epoch, record.clear_epoch)

    def _of_fleet(self, name: bytes) -> int:
        """The fleet's epoch of it, as far as was listed."""
        return max(self._listed.get(name, 0), self._listed.get(EVERYTHING, 0))

    def _applied(self, record: NamespaceRecord) -> Applied:
        """Of one that was never served: what is here is as old as the fleet, or nothing."""
        return self._state.applied.get(record.space.id, Applied(0, record.clear_epoch))

    def _stale(self) -> dict[bytes, int]:
        """What others have cleared and this host has not: the fleet's epochs."""
        stale: dict[bytes, int] = {}
        for record in self._ledger.namespaces():
            name, applied = record.space.id, self._applied(record)
            epoch = self._of_fleet(name)
            if epoch > applied.epoch:
                stale[name] = epoch
        return stale

    def _serve(self) -> None:
        assert self._warehouse is not None
        ready: dict[bytes, Applied] = {}
        with self._change:
            for record in self._ledger.namespaces():
                name = record.space.id
                if name not in self._state.applied:
                    self._state.applied[name] = self._applied(record)
                    self._is_changed = True
                if _owe_unnoted(self._state, record):
                    self._is_changed = self._work = True
                applied = self._state.applied[name]
                is_fresh = self._of_fleet(name) <= applied.epoch
                if is_fresh and self._served.get(name) != applied:
                    ready[name] = applied
            # To write it again, should it be gone.
            of_all = Applied(self._listed.get(EVERYTHING, 0), 0)
            if self._state.applied.get(EVERYTHING, Applied(0, 0)).epoch < of_all.epoch:
                self._state.applied[EVERYTHING] = of_all
                self._is_changed = True
        if self._is_changed:
            self._save()  # first: whoever forgets what was served owes no clear of it
        for name, applied in ready.items():
            if self._warehouse.serve_remote(name, applied):
                self._served[name] = applied

    def _tell_owed(self) -> None:
        with self._change:
            tell = self._tell
            owed = self._state.owed.items()
            self._told = dict(self._told.items() & owed)  # a clear of all has taken over the rest
            room = _TOLD_MAX - len(self._told)
            told = dict([each for each in owed if each[0] not in self._told][:room])
            if tell is not None:
                self._told.update(told)
        for name, clear_epoch in told.items():
            if tell is None or not tell(ClearTold(name.hex(), clear_epoch)):
                return  # it is ended for that

    def _save(self) -> bool:
        """Whether the file has all that is known."""
        with self._saving:
            with self._change:
                if self._ledger.floor != LOST:
                    self._state.floor = self._ledger.floor
                state = replace(
                    self._state, applied=dict(self._state.applied), owed=dict(self._state.owed)
                )
                self._is_changed = False
            why = file.write(self._ledger.calls, self._warehouse_id, state)
            if why and why != self._unsaved:
                path = self._directories[0]
                self._log.event(Event.REMOTE_CLEARS_UNSAVED, path=path, reason=why)
            self._unsaved = why
        return not why


def _owe_unnoted(state: ClearsState, record: NamespaceRecord) -> bool:
    """A clear that the ledger has and nobody noted: by a daemon without the tier."""
    name = record.space.id
    applied = state.applied.get(name)
    if applied is None or record.clear_epoch <= applied.clear_epoch or state.owes(name):
        return False
    state.owed[name] = record.clear_epoch
    return True

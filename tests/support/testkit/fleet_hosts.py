"""Hosts of a fleet over one store, step by step in one thread: what is the daemon's of clears and
what is its worker's are the real ones, the core is a model that knows of each page when it was
computed. Any step can be where a host, or its worker, ends."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from kvwarehouse.daemon import ledger_file
from kvwarehouse.daemon.ledger import Ledger
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.remote_clears import RemoteClears
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import TransportError
from kvwarehouse.remote.epochs import Epochs
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.report import read_line, read_told
from kvwarehouse.types import Namespace
from testkit.timed_store import HostClock, TimedStore

NAMES = FleetNames(bytes(range(16)))


class Ended(BaseException):
    """The process has ended here."""


class Steps:
    """Counts what a process does, and ends it where that is wanted. Each is two: before it is done
    and after."""

    def __init__(self) -> None:
        self.count = 0
        self.ends_at: int | None = None

    def begin(self, ends_at: int | None) -> None:
        self.count, self.ends_at = 0, ends_at

    def step(self) -> None:
        self.count += 1
        if self.count == self.ends_at:
            self.ends_at = None
            raise Ended

    def around(self, do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **named: Any) -> Any:
            self.step()
            result = do(*args, **named)
            self.step()
            return result

        return done


@dataclass
class Space:
    id: bytes
    clear_epoch: int
    remote_epoch: int | None = None
    pages: list[tuple[int, int]] = field(default_factory=list)
    """When each was computed, and the core's epoch under which it was reserved."""


class ModelCore:
    """What of kvwarehouse.core.Core clears use."""

    def __init__(self, steps: Steps, epoch: int) -> None:
        self.steps, self.epoch = steps, epoch
        self.spaces: dict[int, Space] = {}

    def space(self, name: bytes) -> Space | None:
        return next((space for space in self.spaces.values() if space.id == name), None)

    def add_namespace(
        self, ordinal: int, id: bytes, _tokens: int, _s: int, _b: int, at: int
    ) -> int:
        self.steps.step()
        for number, space in self.spaces.items():
            if space.id == id:
                space.clear_epoch = max(space.clear_epoch, at)
                return number
        while ordinal in self.spaces:
            ordinal += 1
        self.spaces[ordinal] = Space(id, at)
        return ordinal

    def forget_namespace(self, ordinal: int) -> bytes:
        self.steps.step()
        for number, space in list(self.spaces.items()):
            if ordinal in (-1, number) and not space.pages:
                return self.spaces.pop(number).id
        return b""

    def raise_epoch(self, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)

    def clear(self, ordinals: Sequence[int], epoch: int) -> int:
        self.steps.step()
        self.raise_epoch(epoch)
        for number in ordinals:
            space = self.spaces[number]
            space.clear_epoch, space.remote_epoch = max(space.clear_epoch, epoch), None
        self.steps.step()
        count = 0
        for number in ordinals:
            space = self.spaces[number]
            before = len(space.pages)
            space.pages = [page for page in space.pages if page[1] >= space.clear_epoch]
            count += before - len(space.pages)
        self.steps.step()
        return count

    def set_remote_epoch(self, name: bytes, epoch: int, clear_epoch: int) -> bool:
        self.steps.step()
        space = self.space(name)
        if space is None or space.clear_epoch != clear_epoch:
            return False
        space.remote_epoch = epoch
        self.steps.step()
        return True

    def stop_remote(self, name: bytes) -> None:
        self.steps.step()
        space = self.space(name)
        if space is not None:
            space.remote_epoch = None

    def status(self) -> dict[str, Any]:
        return {
            "namespaces": [
                {"ordinal": number, "id": space.id.hex(), "pages": len(space.pages)}
                for number, space in self.spaces.items()
            ]
        }


class Host:
    """A daemon, and its worker where it has one. `now`: numbers that rise."""

    def __init__(
        self, folder: Path, number: int, store: TimedStore, clock: HostClock, now: Iterator[int]
    ) -> None:
        folder.mkdir()
        self.folder, self.number, self.store, self.clock, self.now = (
            folder, number, store, clock, now,
        )  # fmt: skip
        self.steps = Steps()
        self.log = io.StringIO()
        self.ledger: Any = None
        self.workers = 0
        self.epochs: Epochs | None = None
        self.lines: list[bytes] = []  # of the worker that the daemon has not read
        self.kept: dict[bytes, list[tuple[int, int]]] = {}  # pages, over a restart
        self.taken: list[tuple[PagesName, int]] = []  # runs that are being put
        self.fetching: list[tuple[bytes, int, int]] = []  # pages on their way here, since a clear
        self.is_cut_off = self.is_in_round = False
        self.behind_ms = 0  # its idea of the store's clock
        self.between: Callable[[], None] = lambda: None
        """Called before each call to the store: what others do meanwhile."""
        self.start()

    # --- the daemon

    def start(self) -> None:
        """Anew, with what is on disk; may end on its way."""
        places, log = [str(self.folder)], Log("json", self.log)
        self.ledger = _SteppedLedger(self.steps, places, b"w" * 16, log, expected=False)
        self.clears: Any = RemoteClears(places, b"w" * 16, self.ledger, log)
        self.clears.finish()
        self.core = ModelCore(self.steps, self.ledger.epoch)
        self.warehouse: Any = DaemonWarehouse(self.core, self.ledger, log, self.clears)  # type: ignore[arg-type]
        self.warehouse.restore()
        self.clears._core, self.clears._warehouse = self.core, self.warehouse
        for name, pages in self.kept.items():
            space = self.core.space(name)
            if space is not None:
                space.pages = [page for page in pages if page[1] >= space.clear_epoch]
        self.kept.clear()

    def end(self) -> None:
        """As by SIGKILL: its worker ends too."""
        self.end_worker()
        for space in self.core.spaces.values():
            self.kept[space.id] = space.pages
        self.ledger.close()
        self.taken.clear()
        self.fetching.clear()
        self.steps.begin(None)

    def restart(self) -> None:
        self.end()
        self.start()

    def pass_(self) -> None:
        """What the daemon's thread does for what it has heard."""
        lines, self.lines = self.lines, []
        for line in lines:
            self.clears.heard(self.workers, read_line(line))
        self.clears._pass()

    # --- the worker

    def start_worker(self) -> None:
        self.workers += 1
        number = self.workers
        self.clears.begin(number)
        epochs = Epochs(NAMES, self.number, self._say, self.clock)

        def tell(line: Any) -> bool:
            self.steps.step()
            if self.workers == number and self.epochs is epochs:
                epochs.tell(read_told(line.to_line()))
            return True

        self.epochs = epochs
        self.clears.attach(tell)

    def end_worker(self) -> None:
        self.epochs = None
        self.lines.clear()
        self.clears.detach()

    def _say(self, line: Any) -> None:
        self.steps.step()
        self.lines.append(line.to_line())
        self.steps.step()

    def round(self) -> bool:
        """Of the worker; False: there is none, or the store failed."""
        if self.epochs is None or self.is_cut_off:
            return False
        self.is_in_round = True
        try:
            now_ms = int(self.store.clock() * 1000) - self.behind_ms
            store: Any = _Stepped(self)
            self.epochs.round(store, now_ms, put_if_absent=True)
        except TransportError:
            return False
        except Ended:
            self.end_worker()
        finally:
            self.is_in_round = False
        return True

    def tend(self) -> None:
        """What its threads do at once."""
        self.pass_()
        self.round()
        self.pass_()

    def cut_off_or_on(self) -> None:
        self.is_cut_off = not self.is_cut_off

    # --- pages

    def compute(self, name: bytes) -> None:
        """A page that an engine stores."""
        space = self.core.space(name)
        if space is not None:
            space.pages.append((next(self.now), self.core.epoch))

    def take(self, name: bytes, at: int) -> None:
        """A page that is to be put, under what the core says now."""
        space = self.core.space(name)
        own = self.own(name)
        if space is not None and space.remote_epoch is not None and own:
            computed = own[at % len(own)]
            key = computed.to_bytes(16, "big")
            self.taken.append((PagesName(name, space.remote_epoch, 0, key), computed))

    def put(self) -> None:
        if self.taken and self.epochs is not None and not self.is_cut_off:
            name, computed = self.taken.pop(0)
            self.store.put(NAMES.pages(name), str(computed).encode())

    def fetch(self, name: bytes, at: int) -> None:
        """As a client that loads what is in the store."""
        space = self.core.space(name)
        found = self.served(name)
        if space is not None and found:
            self.fetching.append((name, found[at % len(found)], space.clear_epoch))

    def fill(self) -> None:
        if self.fetching:
            name, computed, since = self.fetching.pop(0)
            space = self.core.space(name)
            if space is not None and since >= space.clear_epoch:
                space.pages.append((computed, self.core.epoch))

    def served(self, name: bytes) -> list[int]:
        """When what a client would get from the store was computed."""
        space = self.core.space(name)
        if space is None or space.remote_epoch is None:
            return []
        if self.epochs is None or self.is_cut_off or not self.epochs.is_fresh:
            return []
        prefix = NAMES.pages_prefix(name, space.remote_epoch)
        return [
            int(self.store.read(path)) for path in self.store.names() if path.startswith(prefix)
        ]

    def own(self, name: bytes) -> list[int]:
        """When what a client would get from this host was computed."""
        space = self.core.space(name)
        if space is None or self.ledger.find(name) is None:  # nobody opens it unknown
            return []
        return [at for at, epoch in space.pages if epoch >= space.clear_epoch]


class _Stepped:
    """A store whose calls are steps, between which others do something."""

    def __init__(self, host: Host) -> None:
        self._host, self._store = host, host.store

    def list(self, prefix: str) -> Iterator[Any]:
        self._host.between()
        return iter(self._host.steps.around(lambda: list(self._store.list(prefix)))())

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        self._host.between()
        return bool(self._host.steps.around(self._store.put)(name, data, if_absent=if_absent))


class _SteppedLedger(Ledger):
    def __init__(self, steps: Steps, *args: Any, **named: Any) -> None:
        self._steps = steps
        super().__init__(*args, **named)

    def _write_epoch(self) -> bool:
        return bool(self._steps.around(super()._write_epoch)())

    def _commit_to(self, copy: Any, puts: Mapping[bytes, bytes], deletes: Any) -> bool:
        return bool(self._steps.around(super()._commit_to)(copy, puts, deletes))


class Fleet:
    """Hosts of one store, and what has been cleared."""

    def __init__(self, folder: Path, hosts: int, spaces: int = 1) -> None:
        self.clock = HostClock(1_700_000_000.0)
        self.store = TimedStore(self.clock)
        self.now = itertools.count(1)
        self.spaces = [space(number) for number in range(spaces)]
        self.hosts = [
            Host(folder / str(number), number, self.store, self.clock, self.now)
            for number in range(hosts)
        ]
        self.clears: list[Clear] = []

    def clear(self, host: Host, name: bytes | None, *, forget: bool = False) -> Clear:
        record = None if name is None else host.ledger.find(name)
        names = {record.space.id} if record else {space.id for space in self.spaces}
        clear = Clear(host, host.clears, names, next(self.now))
        host.warehouse.clear(record, forget=forget, remote_within_s=0)
        clear.is_here = True
        self.clears.append(clear)
        return clear

    def settle(self, rounds: int = 12) -> None:
        """All run, and reach the store, until nothing is left to do."""
        for host in self.hosts:
            host.is_cut_off = False
            host.steps.begin(None)
        for _ in range(rounds):
            self.clock.now_s += 5.0
            for host in self.hosts:
                if host.epochs is None:
                    host.start_worker()
                host.tend()
            self.check()

    def tend(self) -> None:
        for host in self.hosts:
            host.tend()

    def check(self) -> None:
        """Nobody who knows of what was done serves what is older."""
        for clear in self.clears:
            clear.look(self.clock())
            for host in self.hosts if clear.done_s is not None else ():
                epochs = host.epochs
                knows = epochs is not None and epochs.is_fresh and not host.is_cut_off
                if not knows or (epochs and (epochs._listed_s or 0) <= (clear.done_s or 0)):
                    continue
                for name in clear.names:
                    old = [at for at in host.served(name) if at < clear.at]
                    assert not old, f"host {host.number} serves {old} of before {clear.at}"
                    old = [at for at in host.own(name) if at < clear.at]
                    assert not old, f"host {host.number} has {old} of before {clear.at}"

    def check_here(self) -> None:
        """Who was told of a clear has nothing older of its own, whatever the store does."""
        for clear in self.clears:
            for name in clear.names:
                old = [at for at in clear.host.own(name) if at < clear.at]
                assert not old, f"host {clear.host.number} has {old} of before {clear.at}"


@dataclass
class Clear:
    """`at`: before it was asked for. `done_s`: when its host would have answered "done"."""

    host: Host
    clears: Any
    names: set[bytes]
    at: int
    is_here: bool = False
    done_s: float | None = None

    def look(self, now_s: float) -> None:
        if self.done_s is not None or self.clears is not self.host.clears:
            return
        if not any(self.clears.is_owed(name) for name in self.names):
            self.done_s = now_s


def space(number: int) -> Namespace:
    return Namespace(
        model=f"m{number}", weights="w", dtype="b", layout="l/1", page_tokens=4, page_bytes=8
    )


def read_in_process(path: str, timeout_s: float = 0.0) -> dict[bytes, bytes]:
    """In place of ledger_file.read: as good for a file that is whole, and quick."""
    with (
        lmdb.open(path, subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        return {bytes(key): bytes(value)[8:] for key, value in transaction.cursor()}


def patch(monkeypatch: Any) -> None:
    monkeypatch.setattr(ledger_file, "read", read_in_process)

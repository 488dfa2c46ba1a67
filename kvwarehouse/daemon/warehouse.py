"""What the daemon can do, whoever asks: the core and the ledger kept in step.

Thread-safe. A change of namespaces waits for the ledger's disk, and the next one for it; nobody
else does. Order is the point of this file: a clear is in the ledger before it is in the core,
and a tombstone is written before an eviction is reported, so that no restart brings back what a
caller was told is gone. Where the NVMe tier may have a record that the core does not know, the
tombstone reaches to the end of its log: as the core sees it, or, without the tier, as the ledger
has noted it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.ledger import Ledger, NamespaceRecord, WriteBalance
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.remote_clears_file import Applied
from kvwarehouse.errors import CapacityError, StorageError, TransportError, UsageError
from kvwarehouse.remote.names import EVERYTHING
from kvwarehouse.types import BadCopy, CheckProgress, FlushResult, KeyRun, Namespace, TierCheck
from kvwarehouse.wire import fill, namespace_pb2, status_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvwarehouse.core import Core
    from kvwarehouse.daemon.remote_clears import RemoteClears

ALL: Final = -1
"""In place of an ordinal: all namespaces."""

_NOWHERE: Final = (1 << 16) - 1
"""The ordinal of a namespace that the core does not have (its pages no longer fit): no pages."""

TIER_CHOICES: Final = ("hbm", "dram", "nvme", "all")

_CHECK_PAGES: Final = 16
"""Pages verified at a time, those in DRAM on the core's thread, which stores wait for: 32 MiB of
2 MiB pages are about 3 ms."""


REMOTE_WITHIN_S: Final = 5.0
"""How long a clear waits for the remote store to have it."""


@dataclass(frozen=True)
class Cleared:
    pages: int
    epoch: int
    remote: str
    """"": there is no remote tier; "done": its store has the clear, and hosts that reach it follow;
    "owed": it did not answer, and gets it when it does."""


class DaemonWarehouse:
    """`clears`: with a remote tier, over the hosts of its fleet."""

    def __init__(
        self, core: Core, ledger: Ledger, log: Log, clears: RemoteClears | None = None
    ) -> None:
        self._core = core
        self._ledger = ledger
        self._log = log
        self._clears = clears
        # One change of namespaces at a time: ledger and core must see them in the same order.
        self._changes = threading.Condition(threading.Lock())
        # While the core forgets, or is asked for what must not be forgotten meanwhile. Held within
        # `_changes` or alone, and never over a disk.
        self._names = threading.Lock()
        # The core's numbers: it has given some already to namespaces that it found on its own.
        self._ordinals: dict[bytes, int] = {}
        # Which ledger and core have for sure, with the clears of the fleet.
        self._opened: set[bytes] = set()
        self._evicting: Counter[int] = Counter()  # which no other namespace gets meanwhile
        self._listeners: list[Callable[[NamespaceRecord], None]] = []

    def restore(self) -> None:
        """Tells the core what the ledger knows. Before the core starts."""
        for record in self._ledger.namespaces():
            try:
                self._add_to_core(record)
                self._opened.add(record.space.id)
            except UsageError as error:
                # Its pages no longer fit (a smaller --dram): its KV is out of reach, nothing else.
                self._log.event(
                    Event.NAMESPACE_UNUSABLE,
                    namespace_id=record.space.id.hex(),
                    text=error.message,
                )
        for key, position in self._ledger.tombstones():
            self._core.add_tombstone(key, position)

    def open_namespace(self, space: Namespace) -> NamespaceRecord:
        """Registers `space`, or finds it. At the bound of namespaces it forgets the one that nobody
        uses and that was used longest ago, once no operator evicts from one. Raises UsageError if
        its pages fit no slab or it has too many bytes, CapacityError at the bound where all are in
        use. Waits for changes of others, and for the ledger's disk, only where it is new."""
        if known := self._used(space):
            return known
        with self._changes:
            while True:
                try:
                    return self._open(space)
                except CapacityError as error:
                    if error.code != "too_many_namespaces":
                        raise
                    if self._evicting:  # the core may choose that one
                        self._changes.wait()
                    elif not self._forget([ALL], []):
                        raise

    def _open(self, space: Namespace) -> NamespaceRecord:
        record = self._ledger.find(space.id)
        if record is None:
            record = self._add(space)
        else:
            self._add_to_core(record)  # or says again why not
        self._opened.add(space.id)
        return record

    def _used(self, space: Namespace) -> NamespaceRecord | None:
        """One that was opened before: tells the core that it is used."""
        with self._names:
            record = self._ledger.find(space.id)
            if record is None or space.id not in self._opened:
                return None
            # Without its epoch: that of a clear reaches the core by the clear, once it is written.
            self._add_to_core(replace(record, clear_epoch=0))
        return record

    def listen(self, listener: Callable[[NamespaceRecord], None]) -> None:
        """Calls `listener` with each namespace that is registered from now on, from the thread that
        does. Before anybody else knows of us."""
        self._listeners.append(listener)

    def _add(self, space: Namespace) -> NamespaceRecord:
        # The core first: what it refuses must not take a number in the ledger for ever. A crash in
        # between leaves a namespace without pages, which the next open registers again.
        record = self._ledger.propose(space)
        self._add_to_core(record)
        self._ledger.add(record)
        self._log.event(
            Event.NAMESPACE_ADDED,
            ordinal=self._ordinals[space.id],
            namespace_id=space.id.hex(),
            model=space.model,
            page_tokens=space.page_tokens,
            page_bytes=space.page_bytes,
            shards=space.shards,
            salt=space.shown_fields()["salt"],
        )
        for listener in self._listeners:
            listener(record)
        if self._clears is not None:
            # The core may have pages of it, where a ledger was lost.
            behind = self._clears.added(record, self._pages_of(space.id))
            if behind:
                self._follow({space.id: behind})
        return record

    def _add_to_core(self, record: NamespaceRecord) -> None:
        space = record.space
        ordinal = self._core.add_namespace(
            record.ordinal,
            space.id,
            space.page_tokens,
            space.shards,
            space.page_bytes,
            record.clear_epoch,
        )
        self._ordinals[space.id] = ordinal

    def namespace(self, namespace_id: bytes) -> NamespaceRecord:
        record = self._ledger.find(namespace_id)
        if record is None:
            raise UsageError(
                f"namespace {namespace_id.hex() or '(none)'} is not known here; open it first",
                code="namespace_unknown",
                context={"namespace_id": namespace_id.hex()},
            )
        return record

    def namespaces(self) -> list[NamespaceRecord]:
        return self._ledger.namespaces()

    def clear(
        self,
        record: NamespaceRecord | None,
        *,
        forget: bool = False,
        remote_within_s: float = REMOTE_WITHIN_S,
        who: str = "",
    ) -> Cleared:
        """Removes all pages of a namespace (None: of all) from all tiers, with a remote one from
        those of its fleet, whose store is waited for for `remote_within_s`. `forget`: the namespace
        too; of all, those that nobody stores into or watches. `who`: for the log, as gRPC calls who
        asked.

        Raises StorageError (code "clear_not_durable") when the ledger's disk refuses: the pages are
        gone now, and what NVMe held of them may be there again after a restart; CapacityError (code
        "namespace_in_use") where the one to be forgotten was cleared, and cannot be."""
        with self._changes:
            names = {EVERYTHING if record is None else record.space.id}
            noted = self._note(names)
            try:
                epoch, durable = self._ledger.raise_epoch(
                    None if record is None else [record.space.id]
                )
                ordinals = self._core_ordinals(record)
                pages = self._core.clear(ordinals, epoch)
                forgotten = self._forget(ordinals, self._unplaced(record)) if forget else 0
            finally:
                if self._clears is not None:
                    self._clears.wake()
        remote = self._clears.wait(names, remote_within_s) if self._clears is not None else ""
        self._log.event(
            Event.CLEARED,
            namespace=_named(record),
            pages=pages,
            epoch=epoch,
            namespaces=len(ordinals),
            who=who,
            **({"remote": remote} if remote else {}),
        )
        if remote == "owed" and durable and not noted:
            raise StorageError(
                f"{pages} pages are cleared, but the fleet's store did not answer, and that it is "
                "owed a clear cannot be written beside the ledger (remote_clears_unsaved in the "
                "log says why): a restart may forget it; free the disk and clear again",
                code="clear_not_durable",
                context={"pages": pages, "epoch": epoch},
            )
        if not durable:
            raise StorageError(
                f"{pages} pages are cleared, but the ledger cannot be written "
                f"({self._ledger.reason}): a restart may bring back those on NVMe; free its disk "
                "and clear again",
                code="clear_not_durable",
                context={"pages": pages, "epoch": epoch},
            )
        if forget and record is not None and not forgotten:
            why = (
                "somebody stores into it, watches it or evicts from it; do it again when that ends"
            )
            if count := self._nameless():
                why = (
                    f"that would hide the pages of {count} namespaces that are missing in a ledger "
                    "that was rebuilt; open them first, or clear everything"
                )
            raise CapacityError(
                f"{pages} pages are cleared, but namespace {record.space.id.hex()} is not "
                f"forgotten: {why}",
                code="namespace_in_use",
                context={"pages": pages, "epoch": epoch},
            )
        return Cleared(pages, epoch, remote)

    def _note(self, names: Collection[bytes]) -> bool:
        """That the fleet is owed a clear of them; whether a restart knows it too."""
        return self._clears is None or self._clears.note(names, self._ledger.epoch + 1)

    def clear_for_fleet(self, epochs: Mapping[bytes, int]) -> None:
        """Removes what this host has of namespaces that others have cleared: the fleet's `epochs`.
        It is noted before it is in the ledger (remote_clears.py)."""
        with self._changes:
            known = {name: epoch for name, epoch in epochs.items() if self._ledger.find(name)}
            if known:
                self._follow(known)

    def _follow(self, epochs: Mapping[bytes, int]) -> None:
        assert self._clears is not None
        epoch = self._ledger.epoch + 1
        self._clears.record({name: Applied(of_fleet, epoch) for name, of_fleet in epochs.items()})
        raised, _ = self._ledger.raise_epoch(epochs)
        assert raised == epoch, "the ledger's epoch rises with its changes locked"
        ordinals = [self._ordinals[name] for name in epochs if name in self._ordinals]
        pages = self._core.clear(ordinals, epoch)
        self._log.event(Event.REMOTE_CLEARED, namespaces=len(epochs), pages=pages, epoch=epoch)

    def serve_remote(self, name: bytes, applied: Applied) -> bool:
        """A namespace is of the remote store as `applied` says. False: it is not so any more."""
        assert self._clears is not None
        with self._changes:
            record, ordinal = self._ledger.find(name), self._ordinals.get(name)
            if record is None or ordinal is None or record.clear_epoch != applied.clear_epoch:
                return False
            if self._clears.is_owed(name):
                return False
            if self._core.set_remote_epoch(name, applied.epoch, applied.clear_epoch):
                return True
            # A clear that is in the ledger has not reached it: it did not answer then.
            self._core.clear([ordinal], applied.clear_epoch)
            return self._core.set_remote_epoch(name, applied.epoch, applied.clear_epoch)

    def _pages_of(self, name: bytes) -> int:
        """How many pages the core has of a namespace, whether the ledger knows it or not."""
        text = name.hex()
        return sum(each.pages for each in self.core_status().namespaces if each.id == text)

    def _forget(self, ordinals: list[int], unplaced: list[bytes]) -> int:
        """Those of the core's `ordinals` that nobody uses (ALL: the one used longest ago), and
        `unplaced`, are no more; returns how many. The core first: it says which, and from then on
        nothing is stored in them. After a crash before the ledger has it, or where its disk refuses
        it, a restart knows them again, and what was cleared of them stays away as before. None
        while the core has pages that the rising floor would hide."""
        if self._nameless() or (self._clears is not None and not self._clears.may_forget):
            return 0
        free = [ordinal for ordinal in ordinals if ordinal not in self._evicting]
        with self._names:
            opened, self._opened = self._opened, set()  # nobody knows, if it does not answer
            gone = [name for ordinal in free if (name := self._core.forget_namespace(ordinal))]
            self._opened = opened.difference(gone)
            for name in gone:
                self._ordinals.pop(name, None)
        gone += unplaced
        if not gone:
            return 0
        if self._clears is not None:
            self._clears.forget(gone)
        epoch, _ = self._ledger.forget(gone)
        self._core.raise_epoch(epoch)
        for name in gone:
            self._log.event(Event.NAMESPACE_FORGOTTEN, namespace_id=name.hex(), epoch=epoch)
        return len(gone)

    def ordinal(self, record: NamespaceRecord | None) -> int:
        """The core's number of a namespace, ALL for None."""
        return ALL if record is None else self._ordinals.get(record.space.id, _NOWHERE)

    def info(self, record: NamespaceRecord) -> namespace_pb2.NamespaceInfo:
        """As listings show it."""
        return namespace_pb2.NamespaceInfo(
            id=record.space.id,
            ordinal=self.ordinal(record),
            fields=namespace_pb2.Namespace(**record.space.shown_fields()),
            clear_epoch=record.clear_epoch,
            created_at_ns=record.created_at_ns,
        )

    def _core_ordinals(self, record: NamespaceRecord | None) -> list[int]:
        if record is None:
            # The core's own list: it may know some that a rebuilt ledger does not.
            return [space.ordinal for space in self.core_status().namespaces]
        known = self._ordinals.get(record.space.id)
        return [] if known is None else [known]

    def _nameless(self) -> int:
        """How many namespaces have pages and are not in the ledger: it was lost, and nobody has
        opened them since."""
        return sum(
            bool(each.pages) and not self._ledger.find(bytes.fromhex(each.id))
            for each in self.core_status().namespaces
        )

    def _unplaced(self, record: NamespaceRecord | None) -> list[bytes]:
        """Those that the core does not have: their pages no longer fit."""
        wanted = self._ledger.namespaces() if record is None else [record]
        return [each.space.id for each in wanted if each.space.id not in self._ordinals]

    def evict(
        self, record: NamespaceRecord | None, pages: int, tiers: str, *, who: str = ""
    ) -> tuple[int, int]:
        """Takes the coldest pages of a namespace (None: of any) out of "dram", "nvme" or "all",
        or their copies out of "hbm": (pages evicted, pages of them that left NVMe, or that an NVMe
        tier may have that is not there). `who`: as of a clear.

        Raises StorageError (code "evict_not_durable") when the ledger's disk refuses: the pages are
        gone now, and those that left NVMe may be there again after a restart."""
        if tiers not in TIER_CHOICES:
            raise UsageError(
                f"tiers {tiers!r} is none of {', '.join(TIER_CHOICES)}", code="bad_tiers"
            )
        with self._numbered(record) as ordinal:
            evicted, graves = self._core.evict(ordinal, pages, tiers)
        durable = self._bury(graves)
        self._log.event(
            Event.EVICTED,
            namespace=_named(record),
            pages=evicted,
            nvme_pages=len(graves),
            tiers=tiers,
            who=who,
        )
        if not durable:
            raise StorageError(
                f"{evicted} pages are evicted, but the ledger cannot be written "
                f"({self._ledger.reason}): a restart may bring back the {len(graves)} of them that "
                "were on NVMe, or may be; free its disk, and the daemon writes it within a minute",
                code="evict_not_durable",
                context={"pages": evicted, "nvme_pages": len(graves)},
            )
        return evicted, len(graves)

    @contextlib.contextmanager
    def _numbered(self, record: NamespaceRecord | None) -> Iterator[int]:
        """The core's number of a namespace, which does not become another's meanwhile. Others go
        on: what a fleet has cleared must not wait for an eviction."""
        with self._changes:
            ordinal = self.ordinal(record)
            if ordinal != ALL:
                self._evicting[ordinal] += 1
        try:
            yield ordinal
        finally:
            with self._changes:
                self._evicting -= Counter([ordinal])
                self._changes.notify_all()

    def flush(self, timeout_s: float) -> FlushResult:
        """Waits, at most `timeout_s`, until what was sealed before is durable."""
        result = self._core.flush(timeout_s)
        return FlushResult(result["flushed"], result["not_admitted"], result["pending"])

    def drain(self) -> None:
        """No stores from now on."""
        self._core.drain()

    def undrain(self) -> None:
        self._core.undrain()

    def sweep(self) -> int:
        return self._core.sweep()

    def check(
        self, record: NamespaceRecord | None, *, repair: bool, deadline: Deadline
    ) -> Iterator[CheckProgress]:
        """Verifies stored pages (None: of all namespaces) in both tiers, and yields progress every
        few. Raises TransportError (code "deadline") when its time ends before the pages do."""
        progress, after = CheckProgress(), 0
        while after >= 0:
            if deadline.passed:
                raise TransportError(
                    f"the time of the check was over after {progress.checked} copies of pages;"
                    " give the call more, or check one namespace at a time",
                    code="deadline",
                )
            part = self._core.check(self.ordinal(record), after, _CHECK_PAGES, repair)
            after = part["next"]
            if repair:
                self.bury_quarantined()
            progress = progress.advanced(
                [_tier_check(tier) for tier in part["tiers"]],
                [BadCopy(bad["key"], bad["tier"], bad["reason"]) for bad in part["bad"]],
                done=after < 0,
            )
            yield progress

    def miss_ratio(self, ordinal: int) -> dict[str, Any]:
        return self._core.miss_ratio(ordinal)

    def why(
        self, record: NamespaceRecord, tokens: NDArray[np.uint32] | None, keys: list[bytes] | None
    ) -> dict[str, Any]:
        """What there is of a prompt, and why not the rest: Core.why. Raises UsageError for a
        namespace that is forgotten meanwhile."""
        space = record.space
        return self._core.why(space.id, space.page_tokens, tokens, keys, True, 0)

    def why_run(self, record: NamespaceRecord, run: KeyRun, as_of_ns: int) -> dict[str, Any]:
        """The same of pages in the middle of a prompt, a moment ago, without a search."""
        space = record.space
        keys = (list(run.keys), [len(run.keys)], [run.position], [run.parent])
        return self._core.why(space.id, space.page_tokens, None, keys, False, as_of_ns)

    def take_quarantined(self) -> Callable[[], object] | None:
        """Asks the core for the records that it did not believe, or that left while reclaim moved
        them, and returns what writes their tombstones, so that no restart finds them again: that
        waits for the ledger's disk. None: there are none. Call now and then; what a crash forgets
        is found, and quarantined, again."""
        graves = self._core.take_tombstones()
        return partial(self._bury, graves) if graves else None

    def bury_quarantined(self) -> None:
        """Both, at once."""
        if write := self.take_quarantined():
            write()

    def stop(self) -> None:
        """Ends the core, and keeps what it knew last."""
        self._bury(self._core.stop())

    def _bury(self, graves: list[tuple[bytes, int]]) -> bool:
        return not graves or self._ledger.bury(graves)

    def pages(self, record: NamespaceRecord, after: int, limit: int) -> list[dict[str, Any]]:
        ordinal = self.ordinal(record)
        pages = self._core.pages(ordinal, after, limit)
        return pages if self.ordinal(record) == ordinal else []  # forgotten: they are another's

    def watch(self, record: NamespaceRecord | None, *, tokens_only: bool = False) -> Any:
        """A native Feed of what enters and leaves the tiers, of a namespace (None: of all),
        beginning with all that is stored. The caller closes it. Raises CapacityError (code
        "too_many_watchers") at the bound."""
        with self._names:  # from here on it is not forgotten
            return self._core.watch(self.ordinal(record), tokens_only)

    def core_status(self) -> status_pb2.CoreStatus:
        return fill(status_pb2.CoreStatus(), self._core.status())

    def tend_tombstones(self) -> Callable[[], object]:
        """Asks the core how far its log reaches, and returns what drops the tombstones of what no
        segment holds, keeps the noted end of the log ahead of it, and writes what a full disk has
        missed: that waits for the ledger's disk."""
        nvme = self.core_status().tiers.nvme
        return partial(self._tend, nvme, self._core.log_end())

    def note_writes(self, nvme: status_pb2.NvmeStatus | None = None) -> None:
        """What is left of the write budget, for the next daemon. `nvme`: as the core has just said
        it."""
        nvme = nvme or self.core_status().tiers.nvme
        if nvme.budget_bytes_per_day:
            self._ledger.note_writes(WriteBalance(nvme.budget_left_bytes, time.time_ns()))

    def _tend(self, nvme: status_pb2.NvmeStatus, log_end: int) -> None:
        self.note_writes(nvme)
        if oldest := nvme.oldest_position:
            self._ledger.prune(oldest)
        self._ledger.keep_ahead(log_end)
        self._ledger.heal()


def _tier_check(tier: dict[str, Any]) -> TierCheck:
    return TierCheck(
        tier["tier"],
        tier["pages"],
        tier["bytes"],
        tier["bad"],
        tier["dropped"],
        tier["dropped_bytes"],
    )


def _named(record: NamespaceRecord | None) -> str:
    """For the log: what an operator's command was about."""
    return "all" if record is None else record.space.id.hex()

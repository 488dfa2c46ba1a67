"""The directories of a warehouse without its daemon: the same core, told to change nothing, on
what an earlier daemon left. For `kvwarehouse check --nvme-dir`.

What opening does change: it takes the locks of the directories (a running daemon's are refused),
mends the identity's copies, and in an arena it makes a new index and ends what was being stored, as
every start does. Segments and ledger stay as they are, byte by byte, unless a repair drops
something.

One owner; a context manager.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from kvwarehouse.daemon import directories, identity, ledger_file
from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.identity import WarehouseIdentity
from kvwarehouse.daemon.ledger import Ledger
from kvwarehouse.daemon.ledger_file import DamagedLedgerError
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import StorageError, UsageError
from kvwarehouse.types import CheckProgress

_SHARED_MEMORY: Final = "/dev/shm"
_SLABS: Final = 8
_LEAST_DRAM_BYTES: Final = 16 << 20
_LEAST_SEGMENT_BYTES: Final = 1 << 20
_LEAST_SEGMENTS: Final = 4
_INDEX_TRIES: Final = 4


class Inspection:
    """`recovery`: the core's report of what it found at the start. `findings`: what it said about
    single segments then, as (event's name, fields)."""

    def __init__(self, nvme_dir: str, arena_dir: str, log: Log, engine: Any) -> None:
        """Names one directory or both, "" for none; nothing happens yet. `engine`: the module
        kvwarehouse.core."""
        self._nvme_dir, self._arena_dir = nvme_dir, arena_dir
        self._log = log
        self._engine = engine
        self._stack = ExitStack()
        self._core: Any = None
        self._warehouse: DaemonWarehouse | None = None
        self.recovery: dict[str, Any] = {}
        self.findings: list[tuple[str, dict[str, str]]] = []

    def __enter__(self) -> Self:
        """Raises UsageError for what is no warehouse's directory, StorageError when a daemon runs
        on one (code "owned") or the ledger cannot be believed."""
        with ExitStack() as stack:
            places = [path for path in (self._nvme_dir, self._arena_dir) if path]
            for path in places:
                _refuse_strange(path)
                stack.callback(directories.Ownership(directories.lock_path(path)).close)
            who = identity.establish(places, self._log)
            _refuse_without_ledger(places)
            ledger = Ledger(places, who.warehouse_id, self._log, expected=True, lazy=True)
            stack.callback(ledger.close)
            scratch = Path(tempfile.mkdtemp(prefix="kvw-check-", dir=_scratch_base()))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            self._open_core(scratch, who, ledger)
            stack.callback(self._core.stop)
            self._log.tell(everything=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self, *, repair: bool) -> Iterator[CheckProgress]:
        assert self._warehouse is not None, "enter it first"
        # As long as it takes: it keeps no place of a daemon, and says how far it is.
        return self._warehouse.check(None, repair=repair, deadline=Deadline(math.inf))

    def _open_core(self, scratch: Path, who: WarehouseIdentity, ledger: Ledger) -> None:
        """Again with a larger index where the pages did not fit: what is not in it is not seen."""
        index_pages = 0
        for _ in range(_INDEX_TRIES):
            self._core = self._engine.Core(self._options(scratch, who, ledger, index_pages))
            self._warehouse = DaemonWarehouse(self._core, ledger, self._log)
            self._warehouse.restore()
            self.recovery = self._core.start()
            self.findings = self._core.events()
            status = self._warehouse.core_status()
            if not any(tier.left["window"] for tier in (status.tiers.dram, status.tiers.nvme)):
                return
            index_pages = 2 * max(status.index.capacity, int(self.recovery["records"]))
            self._core.stop()
        raise StorageError(
            f"the pages did not fit an index of {index_pages} entries; give more memory to "
            f"{_scratch_base()}",
            code="index_too_small",
        )

    def _options(
        self, scratch: Path, who: WarehouseIdentity, ledger: Ledger, index_pages: int
    ) -> Any:
        options = self._engine.CoreOptions()
        segments = sorted(_sizes(self._nvme_dir)) or [0]
        segment_bytes = max(_LEAST_SEGMENT_BYTES, segments[-1] + -segments[-1] % 4096)
        options.inspect = True
        options.socket_path = str(scratch / "core.sock")
        options.arena_dir = self._arena_dir or str(scratch / "arena")
        # An arena of the files' own size, or one in name only: nothing is loaded into it.
        options.dram_bytes = _arena_bytes(self._arena_dir) or max(
            _LEAST_DRAM_BYTES, _SLABS * segment_bytes
        )
        options.nvme_dir = self._nvme_dir
        options.nvme_capacity_bytes = max(sum(segments), _LEAST_SEGMENTS * segment_bytes)
        options.nvme_segment_bytes = segment_bytes
        options.index_pages = index_pages
        options.warehouse_id = who.warehouse_id
        options.secret = who.secret
        options.epoch, options.epoch_floor = ledger.epoch, ledger.floor
        return options


def _refuse_strange(path: str) -> None:
    if not identity.is_in(path):
        raise UsageError(
            f"{path!r} is no directory of a warehouse: it has no file "
            f"{identity.FILE_NAMES[0]!r}; name the one that --nvme-dir or --arena-dir of "
            "`kvwarehouse serve` named",
            code="no_warehouse",
        )


def _refuse_without_ledger(places: list[str]) -> None:
    """A lost ledger means that much is to be dropped at the next start; that is the daemon's to
    do, not a check's."""
    found = [os.path.join(path, ledger_file.FILE_NAME) for path in places]
    found = [path for path in found if os.path.exists(path)]
    if not found:
        raise StorageError(
            f"there is no ledger in {' or '.join(places)}; name the warehouse's other directory "
            "too (each has a ledger). If both are "
            "lost, start the daemon, which rebuilds it, and check then",
            code="no_ledger",
        )
    for path in found:
        try:
            ledger_file.read(path)
        except DamagedLedgerError as error:
            raise StorageError(
                f"{path} is damaged: {error}; start the daemon, which sets it aside and rebuilds "
                "it, and check then",
                code="damaged_ledger",
            ) from error


def _sizes(nvme_dir: str) -> list[int]:
    paths = directories.segment_files(nvme_dir) if nvme_dir else []
    return [os.path.getsize(path) for path in paths]


def _arena_bytes(arena_dir: str) -> int:
    return os.path.getsize(os.path.join(arena_dir, "arena")) if arena_dir else 0


def _scratch_base() -> str:
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()

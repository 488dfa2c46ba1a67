"""The ledger's file: checked records in LMDB, read only through a child process, written anew at
every start. Knows bytes; what they mean is ledger.py's.

A file that the child cannot read whole, or whose records fail their checksums, is damaged. A file
that it can is written again, record by record, and the copy takes its place: what is opened here
was made by this LMDB a moment ago, so that damage in pages that hold no record cannot matter.
Not thread-safe: the ledger locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import lmdb

from kvwarehouse.atomic_file import sync_directory
from kvwarehouse.daemon.ledger_probe import DAMAGED, END, LENGTHS
from kvwarehouse.errors import StorageError

FILE_NAME: Final = "ledger.mdb"
MAP_BYTES: Final = 256 << 20
"""Bound of the file: 4096 namespaces of common size and all tombstones take about 30 MiB."""

KEPT_DAMAGED: Final = 3
PROBE_TIMEOUT_S: Final = 60.0
_KILLED_S: Final = 5.0

_CHECK_BYTES: Final = 8
_FROM_PEOPLE: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""What a process dies of that reads a damaged file through LMDB. Other signals come from people,
service managers and the kernel short of memory, and say nothing about the file."""

_PROBE: Final = str(Path(__file__).with_name("ledger_probe.py"))
_FOR_THE_PROBE: Final = ("PATH", "PYTHON", "LD_")
"""What the names of the variables that it is given begin with: no credentials are."""


class DamagedLedgerError(Exception):
    """The file cannot be believed; the text says why."""


def read(path: str, timeout_s: float = PROBE_TIMEOUT_S) -> dict[bytes, bytes]:
    """All records of the file at `path`; the caller lives, whatever is in it. Raises
    DamagedLedgerError, or StorageError when the child could not look, which says nothing about it.
    Blocks for the child, at most `timeout_s`."""
    command = [sys.executable, "-P", _PROBE, path]
    child = _begin_probe(command)
    try:
        found, said = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise _not_probed(path, f"reading it took over {timeout_s:g} s") from None
    finally:
        _end(child)
    last = said.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
    if -child.returncode in _CRASHES:
        raise DamagedLedgerError(f"reading it ended with signal {-child.returncode}")
    if child.returncode == DAMAGED:
        raise DamagedLedgerError(f"reading it failed: {last}")
    if child.returncode < 0:
        raise _not_probed(path, f"reading it was ended by signal {-child.returncode}")
    if child.returncode > 0:
        raise _not_probed(path, last)
    return _decode(found)


def _begin_probe(command: list[str]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C and a service manager's stop are meant for the daemon. Until
    it has that session the child is in the daemon's group, so it is born with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_PEOPLE)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={name: of for name, of in os.environ.items() if name.startswith(_FOR_THE_PROBE)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(child: subprocess.Popen[bytes]) -> None:
    """No wait without a bound: what waits for a disk that does not answer cannot be killed."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_KILLED_S)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def set_aside(path: str) -> str:
    """Renames a damaged file, so that it can be looked at, and keeps only the newest few of them.
    Returns the new name; raises OSError."""
    target = f"{path}.damaged-{time.time_ns()}"
    os.rename(path, target)
    directory, prefix = os.path.split(f"{path}.damaged-")
    kept = sorted(name for name in os.listdir(directory) if name.startswith(prefix))
    for name in kept[:-KEPT_DAMAGED]:
        os.unlink(os.path.join(directory, name))
    return target


class LedgerFile:
    """An open ledger file. `commit` is one durable transaction."""

    def __init__(self, path: str, records: Mapping[bytes, bytes]) -> None:
        """Writes `records` to a new file that takes the place of the one at `path`. Raises OSError
        or lmdb.Error; then the old file is as it was."""
        scratch = f"{path}.new"
        for stale in (scratch, f"{scratch}-lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(stale)
        # lock=False: the daemon owns the directory, and nothing is read back through LMDB.
        self._environment = lmdb.open(
            scratch, subdir=False, lock=False, map_size=MAP_BYTES, mode=0o600
        )
        try:
            self.commit(records, ())
            os.rename(scratch, path)
            sync_directory(os.path.dirname(path))
        except BaseException:
            self._environment.close()
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise

    def commit(self, puts: Mapping[bytes, bytes], deletes: Iterable[bytes]) -> None:
        """Durable when it returns. Raises lmdb.Error; then nothing of it happened."""
        with self._environment.begin(write=True) as transaction:
            for key in deletes:
                transaction.delete(key)
            for key, payload in puts.items():
                transaction.put(key, _checksum(key, payload) + payload)

    def close(self) -> None:
        self._environment.close()


def _not_probed(path: str, why: str) -> StorageError:
    return StorageError(
        f"the ledger {path} could not be probed: {why}; nothing was changed, start again",
        code="ledger_probe_failed",
    )


def _decode(data: bytes) -> dict[bytes, bytes]:
    if not data.endswith(END):
        raise DamagedLedgerError("it could not be read to its end")
    records: dict[bytes, bytes] = {}
    position, stop = 0, len(data) - len(END)
    while position < stop:
        key_bytes, value_bytes = LENGTHS.unpack_from(data, position)
        position += LENGTHS.size
        key = data[position : position + key_bytes]
        value = data[position + key_bytes : position + key_bytes + value_bytes]
        position += key_bytes + value_bytes
        check, payload = value[:_CHECK_BYTES], value[_CHECK_BYTES:]
        if check != _checksum(key, payload):
            raise DamagedLedgerError(f"the checksum of record {key[:20]!r} does not hold")
        records[key] = payload
    return records


def _checksum(key: bytes, payload: bytes) -> bytes:
    state = hashlib.blake2b(key, digest_size=_CHECK_BYTES)
    state.update(payload)
    return state.digest()

"""Fuzz targets in Python: each takes one input, and raises on what must never happen. The native
ones are in native/fuzz. Not thread-safe: targets keep files and a daemon between calls.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvwarehouse import config
from kvwarehouse.daemon import epoch_file, identity, ledger, ledger_file
from kvwarehouse.daemon.ledger_file import DamagedLedgerError
from kvwarehouse.daemon.ledger_probe import END, LENGTHS
from kvwarehouse.errors import StorageError, UsageError
from kvwarehouse.trace.file import ReadOptions, read_trace

Target = Callable[[bytes], None]

_CHECK_BYTES: Final = 32


def settings(data: bytes) -> None:
    """As the TOML file, and each line as a value of the environment."""
    path = _scratch("settings.toml", data)
    for environment in ({}, *_variables(data)):
        flags = {"config": path} if not environment else {}
        try:
            config.load(flags, environment)
        except UsageError as error:
            _require(bool(error.message), "a refusal says why")


def identity_or_epoch(data: bytes) -> None:
    """The small checked files: as they come, and with a checksum that holds."""
    whole = data + hashlib.blake2b(data, digest_size=_CHECK_BYTES).digest()
    for content in (data, whole):
        try:
            with contextlib.suppress(identity._DamagedError):
                identity._decode("/d/identity", content)
        except StorageError as error:
            _require("identity" in error.message, "a refusal names the file")
        path = Path(_scratch("epoch", content))
        try:
            epoch_file.read(str(path.parent), b"w" * 16)
        except StorageError as error:
            _require(error.code == "newer_epoch", error.message)


def ledger_records(data: bytes) -> None:
    """What the probe sends, raw; and lines as records whose checksums hold."""
    with contextlib.suppress(DamagedLedgerError):
        ledger_file._decode(data)
    records = {
        ledger._VERSION_KEY: ledger._U64.pack(ledger.VERSION),
        ledger._WAREHOUSE_KEY: b"w" * 16,
        ledger._SERIAL_KEY: bytes(8),
        ledger._EPOCH_KEY: bytes(8),
    }
    for line in data.split(b"\n"):
        key, _, payload = line.partition(b"=")
        records[key] = payload
    stream = b"".join(
        LENGTHS.pack(len(key), 8 + len(payload))
        + key
        + ledger_file._checksum(key, payload)
        + payload
        for key, payload in records.items()
    )
    assert ledger_file._decode(stream + END) == records
    opened = ledger.Ledger.__new__(ledger.Ledger)
    opened._warehouse_id = b"w" * 16
    with contextlib.suppress(DamagedLedgerError, StorageError):
        opened._decode("/d/ledger.mdb", records)


def trace_file(data: bytes) -> None:
    path = _scratch("trace.jsonl", data)
    for options in (ReadOptions(), ReadOptions(skip_bad=True), ReadOptions(form="bailian")):
        try:
            read_trace(path, options)
        except UsageError as error:
            _require(bool(error.message), "a refusal says why")


def service(data: bytes) -> None:
    """The first byte picks the method, the rest is the request; against a live daemon."""
    _live_service().call(data)


TARGETS: Final[dict[str, Target]] = {
    "settings": settings,
    "identity_or_epoch": identity_or_epoch,
    "ledger_records": ledger_records,
    "trace_file": trace_file,
    "service": service,
}


# --- what targets need


def _require(held: bool, what: str) -> None:
    if not held:
        raise AssertionError(what)


@cache
def _folder() -> Path:
    """In memory. libFuzzer ends the process without its exit functions: scripts/fuzz.sh gives a
    TMPDIR that it removes.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvw-fuzz-", dir=os.environ.get("TMPDIR", "/dev/shm")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _scratch(name: str, data: bytes) -> str:
    path = _folder() / name
    path.write_bytes(data)
    return str(path)


def _variables(data: bytes) -> Iterable[dict[str, str]]:
    for line in data.split(b"\n")[:8]:
        key, _, value = line.partition(b"=")
        text = key.decode("utf-8", "replace").strip().upper()
        if "\0" not in text + value.decode("utf-8", "replace"):
            yield {f"KVW_{text}": value.decode("utf-8", "replace").strip().strip('"')}


@cache
def _live_service() -> Any:
    from testkit.fuzz_service import LiveService

    return LiveService(Path(tempfile.mkdtemp(dir=_folder())))


def close_service() -> None:
    """Ends the daemon of `service`, after a last look at it."""
    _live_service().close()
    _live_service.cache_clear()

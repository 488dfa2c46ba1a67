"""Which way pages on NVMe take to a device: the fastest that was measured, remembered for machines
like this one, and said in words. Without a measurement, the daemon's promotion, which always
works."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvwarehouse.atomic_file import write_atomic
from kvwarehouse.gpu.machine import PROBE_TIMEOUT_S, Machine, probe_machine
from kvwarehouse.gpu.path_benchmark import PATH_TIMEOUT_S, LoadPath, Rates, measure
from kvwarehouse.places import cache_folder

_VERSION = 3
_CLEARLY = 1.05
"""What another way must be faster by than the daemon's promotion, which also fills DRAM for
others."""
_OTHERS_S = PROBE_TIMEOUT_S + len(LoadPath) * PATH_TIMEOUT_S
_LOOK_S = 0.2
_MOST_KNOWN = 16
_PROBLEMS_S = 24 * 3600.0
"""How long a path that could not be measured is not tried again: there may have been no memory."""


@dataclass(frozen=True)
class Choice:
    path: LoadPath
    why: str
    machine: Machine
    rates: Rates
    remembered: bool = False

    def describe(self) -> list[str]:
        measured = [
            f"{path.value}: {self.rates.bytes_per_s[path] / 1e9:.2f} GB/s"
            if path in self.rates.bytes_per_s
            else f"{path.value}: not measured ({self.rates.problems.get(path, 'not tried')})"
            for path in LoadPath
        ]
        told = "remembered" if self.remembered else "measured now"
        return [*self.machine.describe(), *measured, f"NVMe to GPU by {self.in_short} ({told})"]

    @property
    def in_short(self) -> str:
        return f"{self.path}: {self.why}"


def select_path(  # noqa: PLR0913  most by name, and for tests
    folder: Path,
    ordinal: int = 0,
    *,
    memory: Path | None = None,
    among: Sequence[LoadPath] = tuple(LoadPath),
    again: bool = False,
    probe: Callable[[], Machine] = probe_machine,
    measure: Callable[..., Rates] = measure,
) -> Choice:
    """folder: the daemon's segments. ordinal: the device. memory: the file that remembers; default:
    a file of the user's cache. Blocks for probing and measuring, tens of seconds at most, and
    briefly where the answer for this machine, these versions and this file system is remembered,
    unless `again`. What could not be measured then is tried again after a day. Processes that begin
    together take turns, so that all but the first remember; none waits more than two minutes for
    others. Never raises."""
    file = memory or _memory_file()
    with _alone(file):
        machine = probe()
        paths = [path for path in _possible(machine) if path in among]
        key = _key(machine, folder, ordinal, paths)
        known = None if again else _recall(file, key)
        rates = known or (measure(folder, paths, ordinal) if machine.has_device else Rates())
        choice = judge(machine, rates, remembered=known is not None)
        if known is None and LoadPath.DRAM in rates.bytes_per_s:
            _remember(file, key, choice)
    return choice


def last_selection(memory: Path | None = None) -> str:
    """What the last choice on this machine said, "" where there was none. No probe."""
    known = _read(memory or _memory_file()).values()
    return max(known, key=lambda each: each.at_s).words if known else ""


def judge(machine: Machine, rates: Rates, *, remembered: bool = False) -> Choice:
    """Of what was found; no I/O."""
    if not machine.has_device:
        return Choice(LoadPath.DRAM, "there is no GPU", machine, rates, remembered)
    if not rates.bytes_per_s:
        why = next(iter(rates.problems.values()), "nothing was measured")
        return Choice(LoadPath.DRAM, f"not measured: {why}", machine, rates, remembered)
    best = max(rates.bytes_per_s, key=lambda path: rates.bytes_per_s[path])
    dram = rates.bytes_per_s.get(LoadPath.DRAM, 0.0)
    if best is not LoadPath.DRAM and rates.bytes_per_s[best] < _CLEARLY * dram:
        best = LoadPath.DRAM
    return Choice(best, "the fastest that was measured", machine, rates, remembered)


def _possible(machine: Machine) -> list[LoadPath]:
    """The probe tries GPUDirect Storage on a file of its own, which may be on a file system that
    has none: where it came to an end, the segments themselves decide."""
    paths = [LoadPath.DRAM]
    if machine.kvikio:
        paths.append(LoadPath.COMPAT)
    if machine.kvikio and not machine.problem:
        paths.append(LoadPath.GDS)
    return paths


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """While no other process chooses, as far as files can be locked here, and for as long as a
    choice may take."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        until_s = time.monotonic() + _OTHERS_S
        while not _locked(lock) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
        os.close(lock)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _key(machine: Machine, folder: Path, ordinal: int, paths: Sequence[LoadPath]) -> str:
    """What the rates depend on."""
    facts = asdict(machine) | {"ordinal": ordinal, "lanes": paths}
    try:
        disk = os.stat(folder).st_dev
    except OSError:
        disk = -1
    text = json.dumps([_VERSION, facts, disk], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _memory_file() -> Path:
    return Path(cache_folder()) / "gpu_lanes.json"


class _Remembered(NamedTuple):
    """What one measurement is remembered by."""

    rates: Rates
    words: str
    at_s: float
    """Of the Unix epoch."""

    @classmethod
    def read(cls, text: dict[str, Any]) -> _Remembered:
        rates = Rates(
            {LoadPath(name): float(rate) for name, rate in text["bytes_per_s"].items()},
            {LoadPath(name): str(why) for name, why in text["problems"].items()},
            int(text["measured_bytes"]),
        )
        return cls(rates, str(text["words"]), float(text["at_s"]))

    def text(self) -> dict[str, Any]:
        return asdict(self.rates) | {"words": self.words, "at_s": self.at_s}


def _recall(file: Path, key: str) -> Rates | None:
    known = _read(file).get(key)
    if known is None or (known.rates.problems and abs(time.time() - known.at_s) > _PROBLEMS_S):
        return None
    return known.rates


def _remember(file: Path, key: str, choice: Choice) -> None:
    """Beside the newest of the others: other devices, and older states of this machine."""
    known = _read(file) | {key: _Remembered(choice.rates, choice.in_short, time.time())}
    newest = sorted(known, key=lambda each: known[each].at_s)[-_MOST_KNOWN:]
    text = json.dumps({each: known[each].text() for each in newest}, indent=1)
    with suppress(OSError):  # it is measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(str(file), text.encode() + b"\n")


def _read(file: Path) -> dict[str, _Remembered]:
    """What is remembered, by key; nothing where the file is not there, or damaged."""
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
        return {key: _Remembered.read(each) for key, each in text.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

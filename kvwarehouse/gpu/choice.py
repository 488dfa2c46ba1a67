"""Which way pages on NVMe take to a device: the fastest that was measured, remembered for machines
like this one, and said in words. Without a measurement, the daemon's promotion, which always
works."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvwarehouse.gpu.machine import Machine, look
from kvwarehouse.gpu.rates import Lane, Rates, measure

_VERSION = 1
_CLEARLY = 1.05
"""What another way must be faster by than the daemon's promotion, which also fills DRAM for
others."""


@dataclass(frozen=True)
class Choice:
    lane: Lane
    why: str
    machine: Machine
    rates: Rates
    remembered: bool = False

    def words(self) -> list[str]:
        measured = [
            f"{lane.value}: {self.rates.bytes_per_s[lane] / 1e9:.2f} GB/s"
            if lane in self.rates.bytes_per_s
            else f"{lane.value}: not measured ({self.rates.problems.get(lane, 'not tried')})"
            for lane in Lane
        ]
        told = "remembered" if self.remembered else "measured now"
        return [
            *self.machine.words(),
            *measured,
            f"NVMe to GPU by {self.lane}: {self.why} ({told})",
        ]


def choose(
    folder: Path,
    memory: Path | None = None,
    *,
    again: bool = False,
    look: Callable[[], Machine] = look,
    measure: Callable[..., Rates] = measure,
) -> Choice:
    """folder: the daemon's segments. memory: the file that remembers; default: a file of the user's
    cache. Blocks for probing and measuring, tens of seconds at most, and briefly where the answer
    for this machine, these versions and this file system is remembered, unless `again`. Never
    raises."""
    machine = look()
    file = memory or _memory_file()
    key = _key(machine, folder)
    known = None if again else _recall(file, key)
    rates = known or (measure(folder, _possible(machine)) if machine.has_device else Rates())
    choice = judge(machine, rates, remembered=known is not None)
    if known is None and rates.measured_bytes:
        _remember(file, key, rates)
    return choice


def judge(machine: Machine, rates: Rates, *, remembered: bool = False) -> Choice:
    """Of what was found; no I/O."""
    if not machine.has_device:
        return Choice(Lane.DRAM, "there is no GPU", machine, rates, remembered)
    if not rates.bytes_per_s:
        why = next(iter(rates.problems.values()), "nothing was measured")
        return Choice(Lane.DRAM, f"not measured: {why}", machine, rates, remembered)
    best = max(rates.bytes_per_s, key=lambda lane: rates.bytes_per_s[lane])
    dram = rates.bytes_per_s.get(Lane.DRAM, 0.0)
    if best is not Lane.DRAM and rates.bytes_per_s[best] < _CLEARLY * dram:
        best = Lane.DRAM
    return Choice(best, "the fastest that was measured", machine, rates, remembered)


def _possible(machine: Machine) -> list[Lane]:
    lanes = [Lane.DRAM]
    if machine.kvikio:
        lanes.append(Lane.COMPAT)
    if machine.gds:
        lanes.append(Lane.GDS)
    return lanes


def _key(machine: Machine, folder: Path) -> str:
    """What the rates depend on."""
    facts = asdict(machine)
    try:
        disk = os.stat(folder).st_dev
    except OSError:
        disk = -1
    text = json.dumps([_VERSION, facts, disk], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _memory_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kvwarehouse" / "gpu_lanes.json"


def _recall(file: Path, key: str) -> Rates | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
        return Rates(
            {Lane(name): float(rate) for name, rate in found["bytes_per_s"].items()},
            {Lane(name): str(why) for name, why in found["problems"].items()},
            int(found["measured_bytes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # unreadable, damaged or another machine's: measured anew


def _remember(file: Path, key: str, rates: Rates) -> None:
    """One machine's rates: whatever else stood there is of an older state of it."""
    made: dict[str, Any] = {key: asdict(rates)}
    fresh = file.with_suffix(f".{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        fresh.replace(file)
    except OSError:  # it is measured again next time
        with suppress(OSError):
            fresh.unlink()

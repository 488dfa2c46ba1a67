"""What one client loses beside another that does its worst, of each kind: its rate of stores and
loads, and the slowest of its calls but for one in a hundred, against itself alone and against
itself beside one that only computes. Turns alternate, in one daemon. What the second loses to the
first is the machine's doing, not the daemon's."""

from __future__ import annotations

import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from kvwarehouse.errors import WarehouseError
from kvwarehouse.types import Namespace
from kvwarehouse_bench.harness.alternation import rotated
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.options import Options
from kvwarehouse_bench.micro.private import private_daemon

_MODULE: Final = "kvwarehouse_bench.strain.neighbours"
_LOCALLY: Final = "moves pages"
_OVER_GRPC: Final = "moves pages over gRPC"
_COMPUTES: Final = "only computes"
STOPPED: Final = "is stopped with its share"

WORST: Final[Mapping[str, str]] = {
    "never seals what it was granted": _LOCALLY,
    "pins all that it may": _LOCALLY,
    "sends all it can": _LOCALLY,
    "touches all the time": _LOCALLY,
    "opens namespaces all the time": _LOCALLY,
    "evicts and clears all the time": _LOCALLY,
    STOPPED: _LOCALLY,
    "opens calls and says nothing": _OVER_GRPC,
    "lets stores trickle": _OVER_GRPC,
}
"""What a bad neighbour does, and how the good one that it is beside moves its pages."""

_ALONE: Final = "alone"
_BESIDE: Final = f"one that {_COMPUTES}"
_KINDS: Final = ((_COMPUTES, _LOCALLY), (_COMPUTES, _OVER_GRPC), *WORST.items())
_DRAM_BYTES: Final = 256 << 20
_PAGE_BYTES: Final = 64 << 10


class Neighbour:
    """One such client. Blocks for what its process says."""

    def __init__(self, kind: str, **given: Any) -> None:
        """given: what kvwarehouse_bench.strain.neighbours.Given has."""
        self._kind = kind
        command = [sys.executable, "-P", "-m", _MODULE]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVW_")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._tell(json.dumps({"kind": kind, **given}))

    def go(self) -> None:
        """Returns once it is at its worst."""
        self._tell()
        self._hear()
        if self._kind == STOPPED:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def stop(self) -> dict[str, float]:
        """What it did: rounds, and calls_s and p99_s of its calls. What it held is given back."""
        self._process.send_signal(signal.SIGCONT)
        self._tell()
        said: dict[str, float] = self._hear()
        return said

    def _tell(self, what: str = "") -> None:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WarehouseError(f"the client that {self._kind} ended", code="bench")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()


@dataclass(frozen=True)
class _Turns:
    """Of the good one, in the order they ran."""

    beside: Sequence[dict[str, float]]
    limits: Mapping[str, Sequence[dict[str, float]]]
    """By what they are called: alone, and where it is judged beside one that only computes."""

    def figures(self, name: str, *, judged: bool) -> list[Figure]:
        goals = ("ratio 0.5 or more", "ratio 5 or less") if judged else ("", "")
        found = []
        for limit, turns in self.limits.items():
            sides = (self.beside, turns)
            against = "" if limit == _ALONE else f", against {limit}"
            rates = [[_rate(turn) for turn in side] for side in sides]
            waits = [[turn["p99_s"] * 1e3 for turn in side] for side in sides]
            found += [
                _figure(f"{name}: rate{against}", "rounds/s", rates, limit, goals[0]),
                _figure(f"{name}: p99 of a call{against}", "ms", waits, limit, goals[1]),
            ]
        return found


def _rate(turn: dict[str, float]) -> float:
    """Of its calls alone: what it makes of pages meanwhile is its own work."""
    return turn["rounds"] / turn["calls_s"] if turn["calls_s"] > 0 else 0.0


def _figure(name: str, unit: str, sides: list[list[float]], limit_name: str, goal: str) -> Figure:
    beside, limits = sides
    ratios = [ours / limit for ours, limit in zip(beside, limits, strict=True) if limit > 0]
    if not ratios:
        raise WarehouseError(f"beside one that {name}: nothing was done {limit_name}", code="bench")
    quarters = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else ratios * 3
    return Figure(
        name=f"beside one that {name}",
        value=statistics.median(beside),
        unit=unit,
        limit=statistics.median(limits),
        limit_name=limit_name,
        goal=goal,
        ratio_of_rounds=statistics.median(ratios),
        ratio_spread=(quarters[0], quarters[2]),
    )


def measure(options: Options) -> list[Figure]:
    found: list[Figure] = []
    with _daemon() as given, ExitStack() as stack:
        good = {
            way: stack.enter_context(Neighbour(way, seed=seed, space=_space("good"), **given))
            for seed, way in enumerate((_LOCALLY, _OVER_GRPC))
        }
        others = {"seed": 2, "space": _space("bad"), **given}
        computing = stack.enter_context(Neighbour(_COMPUTES, **others))
        for kind, way in _KINDS:
            with Neighbour(kind, **others) as bad:
                limits = {_ALONE: None, **({_BESIDE: computing} if kind in WORST else {})}
                turns = _turns(good[way], bad, limits, options)
            name = f"{kind}, over gRPC" if way == _OVER_GRPC else kind
            found += turns.figures(name, judged=kind in WORST)
    return found


def _turns(
    good: Neighbour, bad: Neighbour, limits: Mapping[str, Neighbour | None], options: Options
) -> _Turns:
    sides: dict[str, Neighbour | None] = {**limits, "": bad}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    _turn(good, None, options)  # to warm up
    for turn in range(options.rounds):
        for name in rotated(list(sides), turn):
            found[name].append(_turn(good, sides[name], options))
    return _Turns(found.pop(""), found)


def _turn(good: Neighbour, other: Neighbour | None, options: Options) -> dict[str, float]:
    if other is not None:
        other.go()
    good.go()
    time.sleep(options.sizes.turn_s)
    did = good.stop()
    if other is not None:
        other.stop()
    return did


def _space(salt: str) -> dict[str, Any]:
    space = Namespace(
        model="kvwarehouse-bench", weights="noise", dtype="uint8", layout="bench/1",
        page_tokens=1, page_bytes=_PAGE_BYTES, salt=salt,
    )  # fmt: skip
    return space.to_fields()


@contextmanager
def _daemon() -> Iterator[dict[str, Any]]:
    """Where it is, as a neighbour is told."""
    token = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile("w", prefix="kvw-bench-token-") as tokens:  # 0600
        print(token, file=tokens, flush=True)
        settings = {"dram": _DRAM_BYTES, "listen": "127.0.0.1:0", "token_file": tokens.name}
        with private_daemon(settings) as (daemon, client):
            yield {
                "address": daemon.address,
                "listen": client.status()["service"]["listen"],
                "token": token,
                "slots": str(daemon.arena_dir / "slots"),
            }

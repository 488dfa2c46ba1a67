"""Runs the long lanes, each whole, and says in docs/verified.md what ran when, and what failed.

    verify.py [LANE ...]            all lanes, in the order of the table; rows of others stay
    verify.py --latest [LANE ...]   the engines' lanes on the newest packages that the ranges allow:
                                    what is to come; writes nothing

A lane is a target of make; its output is in build/verified. Exit status 1 where one failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvwarehouse_bench.micro.conditions import processor

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "verified"
TABLE = ROOT / "docs" / "verified.md"

ENGINES = {
    "transformers": "test-transformers",
    "lowest versions": "test-lowest",
    "dynamo": "test-dynamo",
    "trtllm": "test-trtllm",
    "sglang": "test-sglang",
    "lmcache": "test-lmcache",
    "vllm": "test-vllm",
}
LANES: Mapping[str, str] = {
    "tests": "test",
    "lint": "lint",
    **ENGINES,
    "stores": "test-stores",
    "faults": "faults",
    "asan": "asan",
    "tsan": "tsan",
    "soak": "soak KVW_SOAK_MINUTES=5",
    "random seeds": "test-random MINUTES=10",
    "tests on busy cores": "test-busy RUNS=10",
    "engines on busy cores": "test-busy RUNS=5 TARGET=test-engines",
}

_HEAD = """\
# Verified

`make test-full` writes this table: each lane whole, the last time that it was run. Continuous
integration runs less of them on each change ([CONTRIBUTING.md](../CONTRIBUTING.md#lanes)). What ran
says how many tests passed and how many were skipped.

| lane | command | commit | date | machine | minutes | what ran | failed |
|---|---|---|---|---|---:|---|---|
"""
_PYTEST = re.compile(r"(?:(\d+) failed, )?(\d+) passed(?:, (\d+) skipped)?.* in [\d.]+s")
# CTest 4 says failures only where there are some.
_CTEST = re.compile(r"\d+% tests passed,? (?:(\d+) tests? failed )?out of (\d+)")
_ALONE = re.compile(r"^\w+: (\d+) tests, each in a process of its own$", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_LANE_TITLE = "| {} | `make {}` | {} | {} | {} | {:.1f} | {} | {} |\n"


@dataclass(frozen=True)
class Result:
    lane: str
    target: str
    status: int
    minutes: float
    output: str

    @property
    def ran(self) -> str:
        """Counts of the test runners, or the last line of what has none."""
        passed = skipped = 0
        for found in _PYTEST.finditer(self.output):
            passed += int(found[2])
            skipped += int(found[3] or 0)
        for found in _CTEST.finditer(self.output):
            passed += int(found[2]) - int(found[1] or 0)
        passed += sum(map(int, _ALONE.findall(self.output)))
        if passed:
            return f"{passed:,} passed" + (f", {skipped} skipped" if skipped else "")
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1].replace("|", "/")[:120] if lines else "nothing"

    @property
    def failed(self) -> str:
        if self.status == 0:
            return "nothing"
        named = sorted(set(_FAILED.findall(self.output)))
        return ", ".join(named).replace("|", "/") or f"see {LOGS.name}/{_file(self.lane)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("lanes", nargs="*", metavar="LANE", help=", ".join(LANES))
    parser.add_argument("--latest", action="store_true")
    args = parser.parse_args()
    known = ENGINES if args.latest else LANES
    if unknown := [lane for lane in args.lanes if lane not in known]:
        parser.error(f"no lane {', '.join(unknown)}; there are {', '.join(known)}")
    commit = _commit()
    results = []
    for lane in args.lanes or known:
        results.append(_run(lane, known[lane], latest=args.latest))
        print(f"verify: {lane}: {results[-1].ran}; failed: {results[-1].failed}", flush=True)
        if not args.latest:
            _write(results[-1], commit)
    if args.latest:
        _print_news(args.lanes or list(known))
    return int(any(result.status for result in results))


def _run(lane: str, target: str, *, latest: bool) -> Result:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / _file(lane)
    print(f"verify: {lane}: make {target}, output in {log.relative_to(ROOT)}", flush=True)
    started = time.monotonic()
    with log.open("w") as output:
        # The make above hands its ARGS on, which are the names of lanes.
        command = ["make", *target.split(), "ARGS=", *(["LATEST=yes"] if latest else [])]
        status = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        ).returncode
    minutes = (time.monotonic() - started) / 60
    return Result(lane, target, status, minutes, log.read_text(errors="replace"))


def _file(lane: str) -> str:
    return f"{lane.replace(' ', '_')}.log"


def _write(result: Result, commit: str) -> None:
    """Replaces the lane's row; the others stay, in the order of LANES."""
    rows = {}
    if TABLE.exists():
        for line in TABLE.read_text("utf-8").splitlines(keepends=True):
            name = line.strip("| \n").partition(" |")[0]
            if name in LANES:
                rows[name] = line
    rows[result.lane] = _LANE_TITLE.format(
        result.lane, result.target, commit, time.strftime("%Y-%m-%d"), _machine(),
        result.minutes, result.ran, result.failed,
    )  # fmt: skip
    TABLE.write_text(_HEAD + "".join(rows[lane] for lane in LANES if lane in rows), "utf-8")


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":!{TABLE.relative_to(ROOT)}")
    return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")


def _machine() -> str:
    return f"{processor()}, {os.cpu_count()} cores"


def _print_news(lanes: Sequence[str]) -> None:
    """How the newest versions differ from the locks."""
    for lane in lanes:
        name = f"{ENGINES[lane].removeprefix('test-')}.txt"
        latest = ROOT / "build" / "latest" / name
        if latest.exists():
            before, now = _pins(ROOT / "requirements" / name), _pins(latest)
            changed = [
                f"{package} {before.get(package, 'new')} -> {version}"
                for package, version in now.items()
                if before.get(package) != version
            ]
            print(f"verify: {name}, newer than the lock: {', '.join(changed) or 'nothing'}")


def _pins(lock: Path) -> dict[str, str]:
    lines = [line.partition(" ;")[0].strip() for line in lock.read_text("utf-8").splitlines()]
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    return {package: version for package, _, version in pins if version}


if __name__ == "__main__":
    sys.exit(main())

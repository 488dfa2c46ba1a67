"""One long run of every test that injects faults, counted: `make faults`. Run as

    python -m testkit.fault_run --help

from the project's folder. Steps are native programs (fault_*), the Python tests of faults and
properties, and the fuzzers; two at a time. It fails when a step fails, when too few faults were
injected, or when a class of fault_classes.py was not injected at all.
"""

from __future__ import annotations

import argparse
import datetime
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvwarehouse.cli.output import console, print_json, print_table
from kvwarehouse_bench.harness.markdown import replace_section
from kvwarehouse_bench.micro.conditions import processor
from testkit import tally
from testkit.fault_classes import CLASSES, FaultClass, faults, inputs

BEGIN: Final = "<!-- counts: written by make faults, do not edit -->\n"
END: Final = "<!-- end of counts -->\n"
LEAST: Final = 100_000
LEAST_LIVE: Final = 1_000
_STEP_LIMIT_S: Final = 3600.0
_TAIL_LINES: Final = 60


@dataclass
class Step:
    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    status: int | None = None
    log: Path = Path()

    def replay(self, seed: str) -> str:
        settings = {"KVW_SEED": seed, **self.environment}
        words = [f"{name}={value}" for name, value in settings.items()]
        return " ".join([*words, *self.command])


class Run:
    """seed: of all steps. folder: emptied; gets a log of each step, and their counts."""

    def __init__(self, seed: str, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tally").mkdir(parents=True)
        self._ended = threading.Event()

    def go(self, steps: Sequence[Step], lanes: int) -> None:
        """Returns when all have ended."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        shown = console(stderr=True)
        with Progress(*columns, TimeElapsedColumn(), console=shown, transient=True) as progress:
            task = progress.add_task("faults", total=len(steps))

            def one(step: Step) -> None:
                self._one(step)
                said = "ok" if step.status == 0 else f"FAILED ({step.status})"
                shown.print(f"{step.name}: {said}, {step.seconds:.0f} s")
                injected = faults(self.counts())
                progress.update(task, advance=1, description=f"{injected:,} faults")

            with ThreadPoolExecutor(lanes) as pool:
                list(pool.map(one, steps))

    def _one(self, step: Step) -> None:
        step.log = self.folder / f"{step.name}.log"
        environment = {
            **os.environ,
            **step.environment,
            "KVW_SEED": self.seed,
            tally.FOLDER: str((self.folder / "tally").absolute()),
        }
        begun = time.monotonic()
        with step.log.open("wb") as log:
            try:
                step.status = subprocess.run(
                    step.command, env=environment, stdout=log, stderr=log, timeout=_STEP_LIMIT_S
                ).returncode
            except subprocess.TimeoutExpired:
                step.status = 124
        step.seconds = time.monotonic() - begun

    def counts(self) -> Counter[str]:
        return tally.read(self.folder / "tally")


def steps(build: Path, rounds: int, live_rounds: int, fuzz_s: int) -> list[Step]:
    """Those with processes of their own first: they take longest, and fail most often."""
    live = {tally.ROUNDS: str(live_rounds)}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # A round more is a test that takes longer.
    patient = ["-o", "faulthandler_timeout=0", "-o", f"timeout={int(_STEP_LIMIT_S)}"]
    machine = map(str, sorted(Path("tests/property").glob("test_*.py")))
    found = [Step("properties", [*pytest, *patient, *machine], live)]
    found += [
        Step(path.stem.removeprefix("test_"), [*pytest, *patient, str(path)], live)
        for path in sorted(Path("tests/fault").glob("test_*.py"))
    ]
    if fuzz_s:
        found.append(Step("fuzzers", ["make", "fuzz", f"FUZZ_S={fuzz_s}", "ARGS="]))
    return found + [
        Step(path.name.removesuffix("_test"), [str(path), "--rounds", str(rounds)])
        for path in sorted(build.glob("fault_*_test"))
    ]


def failures(run_steps: Sequence[Step], counts: Counter[str]) -> list[str]:
    """Why the run is no proof; empty when it is one."""
    why = [f"{step.name} failed" for step in run_steps if step.status != 0]
    why += [f"nothing was injected of: {each.name}" for each in CLASSES if not counts[each.name]]
    if faults(counts) < LEAST:
        why.append(f"{faults(counts):,} faults were injected, it takes {LEAST:,}")
    if faults(counts, live=True) < LEAST_LIVE:
        why.append(
            f"{faults(counts, live=True):,} of them against live processes, it takes {LEAST_LIVE:,}"
        )
    return why


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fault_run", description=__doc__)
    parser.add_argument("--build", type=Path, required=True, help="Folder of the native programs.")
    parser.add_argument("--rounds", type=int, default=20, help="Scale of the native programs.")
    parser.add_argument("--live-rounds", type=int, default=5, help="Scale of the Python tests.")
    parser.add_argument("--fuzz-s", type=int, default=30, help="Seconds for each fuzzer; 0: none.")
    parser.add_argument("--lanes", type=int, default=2, help="Steps at a time.")
    parser.add_argument("--seed", default=os.environ.get("KVW_SEED") or str(secrets.randbits(32)))
    parser.add_argument("--folder", type=Path, default=Path("build/faults"), help="For its logs.")
    parser.add_argument("--write", type=Path, help="The document that gets the counts.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead.")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Conditions:
    seed: str
    took_s: float
    machine: str


def with_counts(document: str, counts: Counter[str], conditions: Conditions) -> str:
    """The document with what stands between its marks replaced. ValueError when it has no marks."""
    return replace_section(document, BEGIN, END, _block(counts, conditions))


def _block(counts: Counter[str], conditions: Conditions) -> str:
    lines = [
        f"**{faults(counts):,} faults, {faults(counts, live=True):,} of them against a running"
        f" warehouse, and {inputs(counts):,} hostile inputs: no wrong byte was served, nothing was"
        " lost that was promised to be kept.**",
        f"{conditions.took_s / 60:.0f} minutes on {conditions.machine},"
        f" {datetime.datetime.now(datetime.UTC).date().isoformat()}, seed {conditions.seed}.",
    ]
    for promise in dict.fromkeys(each.promise for each in CLASSES):
        classes = [each for each in CLASSES if each.promise == promise]
        lines += [
            "",
            f"### {promise.capitalize()}",
            "",
            "| fault | injected | where | what was checked after each |",
            "|---|---:|---|---|",
            *(_row(each, counts) for each in classes),
        ]
    return "\n".join([*lines, ""])


def _row(each: FaultClass, counts: Counter[str]) -> str:
    where = "live" if each.live else "in process"
    return f"| {each.name} | {counts[each.name]:,} | {where} | {each.holds} |"


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    run = Run(args.seed, args.folder)
    todo = steps(args.build, args.rounds, args.live_rounds, args.fuzz_s)
    console(stderr=True).print(f"seed: KVW_SEED={args.seed}; logs: {args.folder}")
    begun = time.monotonic()
    run.go(todo, args.lanes)
    counts, took_s = run.counts(), time.monotonic() - begun
    why = failures(todo, counts)
    report(args, todo, counts, took_s, why)
    for step in todo:
        if step.status != 0:
            tail = step.log.read_text(encoding="utf-8", errors="replace").splitlines()
            print("\n".join([f"--- {step.name}", *tail[-_TAIL_LINES:]]), file=sys.stderr)
            print(f"repeat it: {step.replay(args.seed)}", file=sys.stderr)
    if args.write and not why:
        conditions = Conditions(
            args.seed, took_s, f"{processor()}, {len(os.sched_getaffinity(0))} cores"
        )
        document = args.write.read_text(encoding="utf-8")
        args.write.write_text(with_counts(document, counts, conditions), encoding="utf-8")
    return 1 if why else 0


def report(
    args: argparse.Namespace,
    done: Sequence[Step],
    counts: Counter[str],
    took_s: float,
    why: Sequence[str],
) -> None:
    if args.json:
        print_json(
            {
                "seed": args.seed,
                "seconds": round(took_s, 1),
                "faults": dict(counts),
                "steps": {step.name: [step.status, round(step.seconds, 1)] for step in done},
                "failures": list(why),
            }
        )
        return
    rows = [("live" if c.live else "in process", c.name, counts[c.name]) for c in CLASSES]
    print_table("faults injected", ("where", "what", ">how many"), rows)
    print(
        f"{faults(counts):,} faults, {faults(counts, live=True):,} of them live, and"
        f" {inputs(counts):,} hostile inputs in {took_s / 60:.1f} minutes, seed {args.seed}"
    )
    print("\n".join(why) or "nothing wrong, nothing lost")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

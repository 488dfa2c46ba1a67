"""Load or recompute, over disks from crawling to fast: the time to first token with the connector's
own choice, against recomputing everything.

    .venv-vllm/bin/python bench/vllm_sweep.py --help
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvwarehouse.errors import UsageError
from kvwarehouse.report.report import Report
from kvwarehouse_bench.harness.alternation import rotated
from kvwarehouse_bench.harness.frame import BenchProgress
from kvwarehouse_bench.micro.conditions import load_average
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS, SHAPES, ModelShape, write_checkpoint
from kvwarehouse_bench.vllm.engine import (
    ALONE,
    Offline,
    VllmEngine,
    engine_environment,
    engine_options,
    warehouse_transfer,
)
from kvwarehouse_bench.vllm.frame import bench_parser, conditions, numbers, run
from kvwarehouse_bench.vllm.messages import DEVICE, DISK, HOST, Ask, EngineReply
from kvwarehouse_bench.vllm.slow_disk import SlowDisk
from kvwarehouse_bench.vllm.sweep_report import (
    AGAIN,
    CHOICE,
    RECOMPUTED,
    Speed,
    SweepResults,
    sweep_report,
)
from kvwarehouse_bench.vllm.warehouse import EngineWarehouse, private_warehouse

ABOUT = """\
The connector may load a stored prompt or let the engine compute it; it must never be much slower
than an engine that computes everything, however slow the disk. Here all KV lies on NVMe, and reads
of it take as long as on a disk of a chosen speed. Speeds are multiples of break-even, the one at
which loading takes as long as computing, measured first. At each, three ways take turns:

  recomputed   the engine computes everything
  again        the same once more: how far its own p99 is from itself
  choice       the connector as users have it (kvwarehouse.load = worth): it loads, computes, or
               begins to load and gives up

Fast and slow disks alternate, so that each begins with what the connector learnt from its opposite.
The goal: p99 at most 1.05 times that of recomputing, at every speed."""

EXAMPLES = """\
  bench/vllm_sweep.py                       about 25 minutes on two cores
  bench/vllm_sweep.py --quick
  bench/vllm_sweep.py --speeds 0.5,1,2 --samples 300
  bench/vllm_sweep.py --together 4          4 prompts at once: their loads share the disk

The disk is slowed in the daemon alone, by a library that delays its reads (slow_disk.c);
a C compiler is needed, root is not."""

_SPEEDS, _QUICK_SPEEDS = "0.02,0.1,0.5,0.9,1.1,2,10,0", "0.1,1,10"
_SAMPLES, _QUICK_SAMPLES = 80, 6
_TOKENS = 1024
_CALIBRATIONS = 5
_PROMPTS = 4
_MOST_TOGETHER = 16
_STEP_TOKENS = 2048
_SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class SweepBench:
    """batches: of prompts that are asked at once, all of them stored."""

    engine: VllmEngine
    warehouse: EngineWarehouse
    disk: SlowDisk
    batches: Sequence[Sequence[Sequence[int]]]

    def recomputed(self, turn: int) -> EngineReply:
        self.engine.forget()
        batch = self.batches[turn % len(self.batches)]
        answer = self.engine.ask([Ask(tokens, params=ALONE) for tokens in batch])
        cached = sum(answer.counts.get(source, 0.0) for source in (DEVICE, HOST, DISK))
        assert not cached, f"{cached:.0f} tokens of prompts that were to be computed were cached"
        return answer

    def choice(self, turn: int) -> EngineReply:
        self.warehouse.only_on_nvme()
        self.engine.forget()
        return self.engine.ask([Ask(tokens) for tokens in self.batches[turn % len(self.batches)]])

    def store(self) -> None:
        for batch in self.batches:
            self.engine.ask([Ask(tokens) for tokens in batch])
        pages = sum(len(tokens) // BLOCK_TOKENS for batch in self.batches for tokens in batch)
        self.warehouse.wait_durable(pages)
        self.choice(0)  # what runs for the first time is slower


def main() -> int:
    parser = bench_parser("vllm_sweep", ABOUT, EXAMPLES)
    parser.add_argument(
        "--speeds",
        metavar="X,...",
        help=f"Multiples of break-even; 0: the disk as it is. Default: {_SPEEDS}.",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help=f"At each speed. Default: {_SAMPLES}."
    )
    parser.add_argument(
        "--tokens", type=int, default=_TOKENS, metavar="N", help="Of a prompt. Default: 1024."
    )
    parser.add_argument(
        "--together", type=int, default=1, metavar="N", help="Prompts at once. Default: 1."
    )
    return run(parser, measure)


def measure(args: argparse.Namespace, folder: Path, teller: BenchProgress) -> Report:
    speeds = _speeds(args.speeds or (_QUICK_SPEEDS if args.quick else _SPEEDS))
    samples = args.samples or (_QUICK_SAMPLES if args.quick else _SAMPLES)
    numbers(str(samples), "--samples", 2, 100_000)
    numbers(str(args.tokens), "--tokens", 2 * BLOCK_TOKENS, 65_536)
    numbers(str(args.together), "--together", 1, _MOST_TOGETHER)
    shape = SHAPES[args.model]
    found = SweepResults(shape, args.tokens, args.together, conditions(args.model, shape))
    teller.step("a model is made and an engine starts")
    with _started(args, folder, shape) as bench:
        bench.store()
        found.break_even_bytes_per_s = _break_even(bench, found)
        teller.expect(len(speeds) * samples)
        for multiple in speeds:
            speed = Speed(multiple, multiple * found.break_even_bytes_per_s)
            bench.disk.turn_to(speed.bytes_per_s)
            found.speeds.append(speed)
            for turn in range(samples):
                teller.step(f"{speed.name}: {turn + 1} of {samples}", 1)
                _sample(bench, speed, turn)
    found.conditions["load after"] = load_average()
    return sweep_report(found)


def _sample(bench: SweepBench, speed: Speed, turn: int) -> None:
    """Each way once; which is first changes."""
    ways = [RECOMPUTED, AGAIN, CHOICE]
    for way in rotated(ways, turn):
        speed.add(way, bench.choice(turn) if way == CHOICE else bench.recomputed(turn))


def _break_even(bench: SweepBench, found: SweepResults) -> float:
    """Bytes a second of a disk that delivers KV as fast as the engine computes it."""
    taken = [bench.recomputed(turn).seconds for turn in range(_CALIBRATIONS)]
    tokens_per_s = found.tokens * found.together / statistics.median(taken)
    found.conditions["prefill"] = f"{tokens_per_s:,.0f} tokens/s"
    return tokens_per_s * found.shape.kv_bytes_per_token


def _speeds(text: str) -> list[float]:
    """Slow and fast in turns."""
    try:
        given = sorted({float(part) for part in text.split(",")}, key=lambda x: x or float("inf"))
    except ValueError:
        raise UsageError(f"--speeds {text}: not a list of numbers", code="bad_bench") from None
    if any(each < 0 or each > 1e6 or 0 < each < 1e-4 for each in given):
        raise UsageError(f"--speeds {text}: use 0, or 0.0001 to 1000000", code="bad_bench")
    found: list[float] = []
    while given:
        found.append(given.pop(-1 if len(found) % 2 == 0 else 0))
    return found


@contextlib.contextmanager
def _started(args: argparse.Namespace, folder: Path, shape: ModelShape) -> Iterator[SweepBench]:
    most_tokens = args.tokens + BLOCK_TOKENS
    held = shape.kv_bytes_per_token * args.tokens * args.together * _PROMPTS
    checkpoint = write_checkpoint(shape, most_tokens, folder / "model")
    nvme = folder / "nvme"
    disk = SlowDisk(nvme, folder)
    with contextlib.ExitStack() as stack:
        with disk.preloaded():
            room = (2 * held + _SPARE_BYTES, 4 * held + (1 << 30))
            warehouse = stack.enter_context(private_warehouse(nvme, *room, io_engine="pread"))
        options = engine_options(
            checkpoint, most_tokens, _STEP_TOKENS, warehouse_transfer(warehouse.address)
        )
        engine = stack.enter_context(
            Offline(options, engine_environment(folder, 1 + (2 * held >> 30)), folder)
        )
        words = random.Random(0)
        batches = [
            [words.choices(shape.words, k=args.tokens) for _ in range(args.together)]
            for _ in range(_PROMPTS)
        ]
        yield SweepBench(engine, warehouse, disk, batches)


if __name__ == "__main__":
    sys.exit(main())

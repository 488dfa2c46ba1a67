"""What the connector costs an engine in which nothing is reused: steps with it and without it, in
turns inside one engine, and the time of each of its hooks.

    .venv-vllm/bin/python bench/vllm_overhead.py --help
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvwarehouse.report.report import Report
from kvwarehouse_bench.harness.frame import BenchProgress
from kvwarehouse_bench.harness.process import ProgramError
from kvwarehouse_bench.micro.conditions import load_average
from kvwarehouse_bench.vllm.arms import effect
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS, SHAPES, ModelShape, write_checkpoint
from kvwarehouse_bench.vllm.engine import (
    Offline,
    VllmEngine,
    engine_environment,
    engine_options,
    toggled_transfer,
)
from kvwarehouse_bench.vllm.frame import bench_parser, conditions, numbers, run
from kvwarehouse_bench.vllm.messages import Ask
from kvwarehouse_bench.vllm.overhead_report import Hook, OverheadResults, overhead_report
from kvwarehouse_bench.vllm.warehouse import private_warehouse

ABOUT = """\
Cost of a step when nothing is reused. Between engines, and between runs, steps differ by more than
a connector costs; so one engine runs with a switch: a few steps without the connector's hooks, as
many without them again, as many with them, in random order, over and over. Each such triple gives
two ratios: off again / off, which says what this machine can tell apart, and on / off.

  decode    8 long sequences; each step one token of each. Every 4th step fills a block, which the
            connector stores
  prefill   prompts that nobody has asked before, one a step; all their blocks are stored

Stores are counted with the steps that they belong to: they run behind the engine, but on the same
cores. Nothing is loaded. The goal is at most 1 % of a step."""

EXAMPLES = """\
  bench/vllm_overhead.py                  about 12 minutes on two cores
  bench/vllm_overhead.py --quick
  bench/vllm_overhead.py --seconds 900    narrower intervals: half as wide for four times as long
  bench/vllm_overhead.py --nvme           with writes to NVMe behind the stores"""

_SECONDS, _QUICK_SECONDS = 240, 15
_SEQUENCES = 8
# One sequence after the other fills a block, so that each turn stores equally many.
_STAGGER_TOKENS = BLOCK_TOKENS // _SEQUENCES
_DECODE_STEPS_EACH = 3 * _STAGGER_TOKENS
_PREFILL_STEPS_EACH = 4
_BEGIN_TOKENS = 1024
_GENERATED_TOKENS = 1536
_STEP_TOKENS = 512
_PROMPTS_AT_ONCE = 96
_TIMED_PROMPTS = 12
_TIMED_TOKENS = 256
_DRAM_BYTES = 1 << 30
_NVME_BYTES = 4 << 30


def main() -> int:
    parser = bench_parser("vllm_overhead", ABOUT, EXAMPLES)
    parser.add_argument(
        "--seconds",
        type=int,
        metavar="N",
        help=f"Of each kind of step. Default: {_SECONDS}.",
    )
    parser.add_argument("--nvme", action="store_true", help="With an NVMe tier; else DRAM alone.")
    return run(parser, measure)


class OverheadBench:
    """Runs phases of the connector with a switch, and fetches what it saw."""

    def __init__(self, engine: VllmEngine, shape: ModelShape, folder: Path) -> None:
        self._engine = engine
        self._shape = shape
        self._folder = folder
        self._numbers = random.Random(0)

    def prompt(self, tokens: int) -> list[int]:
        """One that nobody has asked before."""
        return self._numbers.choices(self._shape.words, k=tokens)

    def decode(self, params: dict[str, Any], generated: int) -> None:
        lengths = [_BEGIN_TOKENS + _STAGGER_TOKENS * at for at in range(_SEQUENCES)]
        self._engine.forget()
        self._engine.ask([Ask(self.prompt(length), generated, params) for length in lengths])

    def prefill(self, params: dict[str, Any], prompts: int) -> None:
        self._engine.forget()
        self._engine.ask([Ask(self.prompt(_STEP_TOKENS), 1, params) for _ in range(prompts)])

    def seen(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """By the scheduler's half and by the worker's, in the phase so far."""
        path = self._folder / "seen"
        ask = Ask(self.prompt(BLOCK_TOKENS), 1, {"bench.report": str(path)})
        self._engine.ask([ask])
        try:
            halves = [path.with_suffix(f".{half}") for half in ("scheduler", "worker")]
            scheduler, worker = (json.loads(half.read_text("utf-8")) for half in halves)
        except OSError as error:
            raise ProgramError(f"the connector did not say what it saw: {error}") from None
        return scheduler, worker


def measure(args: argparse.Namespace, folder: Path, teller: BenchProgress) -> Report:
    seconds = args.seconds or (_QUICK_SECONDS if args.quick else _SECONDS)
    numbers(str(seconds), "--seconds", 5, 86_400)
    shape = SHAPES[args.model]
    found = OverheadResults(conditions(args.model, shape))
    found.conditions["tiers"] = "DRAM and NVMe" if args.nvme else "DRAM"
    teller.step("a model is made and an engine starts")
    most_tokens = _BEGIN_TOKENS + BLOCK_TOKENS + _GENERATED_TOKENS
    checkpoint = write_checkpoint(shape, most_tokens, folder / "model")
    cache_gib = 1 + (2 * _SEQUENCES * most_tokens * shape.kv_bytes_per_token >> 30)
    nvme = folder / "nvme" if args.nvme else None
    with private_warehouse(nvme, _DRAM_BYTES, _NVME_BYTES) as warehouse:
        transfer = toggled_transfer(warehouse.address)
        options = engine_options(checkpoint, most_tokens, _STEP_TOKENS, transfer)
        options["max_num_seqs"] = _SEQUENCES
        with Offline(options, engine_environment(folder, cache_gib), folder) as engine:
            bench = OverheadBench(engine, shape, folder)
            teller.expect(2.1 * seconds)
            _arms(bench, found, teller, seconds)
            teller.step("each hook is timed")
            _timers(bench, found)
    found.conditions["load after"] = load_average()
    return overhead_report(found)


def _arms(
    bench: OverheadBench, found: OverheadResults, teller: BenchProgress, seconds: int
) -> None:
    """Each kind of step, for `seconds` and to the end of what was then asked."""
    decode = {"bench.phase": "decode", "bench.steps": _DECODE_STEPS_EACH}
    teller.step("decode: 8 sequences")
    for taken in _until(seconds, lambda: bench.decode(decode, _GENERATED_TOKENS)):
        teller.step("decode: 8 sequences", taken)
    log = bench.seen()[0]["log"]
    found.effects["decode"] = effect(log, _SEQUENCES, _DECODE_STEPS_EACH)
    prefill = {"bench.phase": "prefill", "bench.steps": _PREFILL_STEPS_EACH}
    for taken in _until(seconds, lambda: bench.prefill(prefill, _PROMPTS_AT_ONCE)):
        teller.step("prefill: new prompts", taken)
    log = bench.seen()[0]["log"]
    found.effects["prefill"] = effect(log, _STEP_TOKENS, _PREFILL_STEPS_EACH)


def _until(seconds: int, ask: Callable[[], None]) -> Iterator[float]:
    """Seconds of each ask, until `seconds` are over."""
    end = time.monotonic() + seconds
    while (begin := time.monotonic()) < end:
        ask()
        yield time.monotonic() - begin


def _timers(bench: OverheadBench, found: OverheadResults) -> None:
    """All hooks with a clock around them, decode and prefill apart; that clock is in the times."""
    asks: dict[str, Callable[[dict[str, Any]], None]] = {
        "decode": lambda params: bench.decode(params, _TIMED_TOKENS),
        "prefill": lambda params: bench.prefill(params, _TIMED_PROMPTS),
    }
    for kind, ask in asks.items():
        ask({"bench.phase": f"timers {kind}"})
        for half, seen in zip(("scheduler", "worker"), bench.seen(), strict=True):
            found.hooks += [
                Hook.of(kind, half, name, calls_ns) for name, calls_ns in seen["timers"].items()
            ]


if __name__ == "__main__":
    sys.exit(main())

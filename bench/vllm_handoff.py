"""Time to first token of a decode engine: prompts that it computes itself, and prompts that a
prefill engine computed and handed over through the warehouse.

    .venv-vllm/bin/python bench/vllm_handoff.py --help
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvwarehouse.errors import UsageError
from kvwarehouse.report.report import Report
from kvwarehouse_bench.harness.frame import BenchProgress
from kvwarehouse_bench.micro.conditions import load_average
from kvwarehouse_bench.micro.load import copy_bytes_per_s
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS, SHAPES, TAIL_TOKENS, write_checkpoint
from kvwarehouse_bench.vllm.engine import (
    SETTLE_S,
    Offline,
    VllmEngine,
    engine_environment,
    engine_options,
    usable_cores,
    warehouse_transfer,
)
from kvwarehouse_bench.vllm.frame import Prompts, bench_parser, conditions, run
from kvwarehouse_bench.vllm.handoff_report import handoff_report
from kvwarehouse_bench.vllm.pair import EnginePair
from kvwarehouse_bench.vllm.results import TtftResults
from kvwarehouse_bench.vllm.warehouse import private_warehouse

ABOUT = """\
Time to first token with a prefill engine (kv_producer) and a decode engine (kv_consumer) on one
warehouse: one prompt at a time, one token generated, wall time. The bench does what a proxy does.

  no hand-off     the decode engine computes the prompt; the prefill engine does nothing
  hand-off        from when the prompt goes to the decode engine, with the record of the prefill
                  engine that has just answered; the last pages may be on their way still
  stored before   the same prompt again, emptied from the engine's cache, all pages long stored
  prefix cache    from the decode engine's own cache: the least that any of it can cost
  prefill engine  from when the prompt goes to the prefill engine to its answer
  end to end      that and the hand-off together: what a client waits for

Every round has a prompt of its own, and with and without hand-off are first in turns. Each sample
is checked against vLLM's own count of where the prompt's tokens came from. The model is made on the
spot with random weights; nothing is downloaded."""

EXAMPLES = """\
  bench/vllm_handoff.py                         about 6 minutes on two cores
  bench/vllm_handoff.py --quick
  bench/vllm_handoff.py --lengths 1024,4096 --rounds 9 --json handoff.json --html handoff.html"""

_PROMPTS = Prompts("256,1024,2048,4096,8192", "64,512", rounds=7, quick_rounds=3)
_STEP_TOKENS = 2048
_WARM_TOKENS = 256
_WARM_ROUNDS = 2
_SPARE_BYTES = 256 << 20


def main() -> int:
    parser = bench_parser("vllm_handoff", ABOUT, EXAMPLES)
    _PROMPTS.add_to(parser)
    parser.add_argument(
        "--cores",
        choices=("apart", "shared"),
        default="apart",
        help="What the engines compute on: each its half of the cores, as engines have devices of"
        " their own, or both on all of them. Default: apart.",
    )
    return run(parser, measure)


def measure(args: argparse.Namespace, folder: Path, teller: BenchProgress) -> Report:
    lengths, rounds = _PROMPTS.chosen(args)
    shape = SHAPES[args.model]
    found = TtftResults(
        shape, lengths, conditions(args.model, shape), copy_bytes_per_s(), TAIL_TOKENS
    )
    found.conditions["rounds"] = f"{rounds}, with and without hand-off first in turns"
    found.conditions["prompts"] = f"{TAIL_TOKENS} tokens longer than said, each asked in one round"
    found.conditions["through"] = "LLM.generate of two engines"
    found.conditions["cores"] = _said(args)
    teller.step("a model is made and the engines start")
    with _pair(args, folder, lengths[-1]) as pair:
        numbers_of_run = random.Random(0)
        teller.expect(rounds * sum(lengths))
        for turn in range(_WARM_ROUNDS):  # what runs for the first time is slower
            pair.round(shape.prompt(_WARM_TOKENS, numbers_of_run), turn)
        pair.outcomes.clear()
        for turn in range(rounds):
            for length in lengths:
                teller.step(f"{length} tokens: round {turn + 1} of {rounds}", length)
                prompt = shape.prompt(length + TAIL_TOKENS, numbers_of_run)
                for way, sample in pair.round(prompt, turn).items():
                    found.add(way, length, sample)
    found.conditions["load after"] = load_average()
    return handoff_report(found, pair.outcomes)


@contextlib.contextmanager
def _pair(args: argparse.Namespace, folder: Path, longest: int) -> Iterator[EnginePair]:
    """Both engines ready."""
    shape = SHAPES[args.model]
    held = shape.kv_bytes_per_token * longest
    most_tokens = longest + BLOCK_TOKENS
    checkpoint = write_checkpoint(shape, most_tokens, folder / "model")
    with contextlib.ExitStack() as stack:
        warehouse = stack.enter_context(private_warehouse(None, 2 * held + _SPARE_BYTES, 0))

        def started(role: str, cores: Sequence[int]) -> VllmEngine:
            environment = engine_environment(folder, 1 + (2 * held >> 30), cores)
            transfer = warehouse_transfer(warehouse.address, role)
            options = engine_options(checkpoint, most_tokens, _STEP_TOKENS, transfer)
            engine: VllmEngine = Offline(options, environment, folder)
            return stack.enter_context(engine)

        for_prefill, for_decode = _cores(args)
        prefill, decode = started("kv_producer", for_prefill), started("kv_consumer", for_decode)
        yield EnginePair(prefill, decode, warehouse, lambda: time.sleep(SETTLE_S))


def _cores(args: argparse.Namespace) -> tuple[Sequence[int], Sequence[int]]:
    """Of the prefill and the decode engine. Raises UsageError where they cannot be apart."""
    usable = usable_cores()
    if args.cores == "shared":
        return usable, usable
    half = len(usable) // 2
    if not half:
        raise UsageError("--cores apart needs two cores; use --cores shared", code="bad_bench")
    return usable[:half], usable[half : 2 * half]


def _said(args: argparse.Namespace) -> str:
    ours, theirs = (len(cores) for cores in _cores(args))
    if args.cores == "shared":
        return f"both engines compute on all {theirs}"
    return f"each engine computes on {ours} of its own; its other processes run anywhere"


if __name__ == "__main__":
    sys.exit(main())

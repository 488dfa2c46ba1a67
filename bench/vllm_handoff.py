"""Time to first token of a decode engine: its prompts computed by itself, or by a prefill engine
that hands them over through the warehouse.

    .venv-vllm/bin/python bench/vllm_handoff.py --help
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench_frame.memory import copy_bytes_per_s
from bench_frame.process import ProgramError
from bench_frame.progress import Teller
from kvwarehouse.cli.bench.conditions import load_average
from kvwarehouse.planner.report import Report
from vllm_bench.checkpoint import BLOCK_TOKENS, SHAPES, write_checkpoint
from vllm_bench.conditions import conditions
from vllm_bench.engine import Engine, Offline
from vllm_bench.environment import engine_environment
from vllm_bench.frame import bench_parser, numbers, run
from vllm_bench.handed import Handed
from vllm_bench.handoff_report import handoff_report
from vllm_bench.options import engine_options, warehouse_transfer
from vllm_bench.ttft_report import Found
from vllm_bench.warehouse import private_warehouse

ABOUT = """\
Time to first token of a decode engine (kv_consumer) beside a prefill engine (kv_producer), both on
one warehouse: one prompt at a time, one token generated, wall time.

  alone         the decode engine computes the prompt; the prefill engine does nothing
  handed over   the prefill engine has just answered: its record comes with the request, and its
                last pages may be on their way still
  stored        the same prompt again, when all its pages have been there for a second
  both          the prefill engine's time and that of `handed over` together: what a client waits

Each sample is checked against vLLM's own count of where the prompt's tokens came from. The model is
made on the spot with random weights; nothing is downloaded."""

EXAMPLES = """\
  bench/vllm_handoff.py
  bench/vllm_handoff.py --quick
  bench/vllm_handoff.py --lengths 1024,4096 --rounds 9 --json handoff.json --html handoff.html"""

_LENGTHS, _QUICK_LENGTHS = "256,1024,2048,4096", "64,512"
_ROUNDS, _QUICK_ROUNDS = 7, 3
# Prompts of users end inside a block.
_TAIL_TOKENS = 9
_STEP_TOKENS = 2048
_LONGEST = 131_072
_WARM_TOKENS = 256
_SPARE_BYTES = 256 << 20
# An engine's worker looks for work without sleeping for a second after its last step.
_SETTLE_S = 1.2


def main() -> int:
    parser = bench_parser("vllm_handoff", ABOUT, EXAMPLES)
    parser.add_argument(
        "--lengths", metavar="N,...", help=f"Prompt lengths in tokens. Default: {_LENGTHS}."
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"Default: {_ROUNDS}.")
    return run(parser, measure)


def measure(args: argparse.Namespace, folder: Path, teller: Teller) -> Report:
    chosen = args.lengths or (_QUICK_LENGTHS if args.quick else _LENGTHS)
    lengths = numbers(chosen, "--lengths", BLOCK_TOKENS + 1, _LONGEST)
    rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)
    numbers(str(rounds), "--rounds", 1, 1000)
    shape = SHAPES[args.model]
    found = Found(shape, lengths, conditions(args.model, shape), copy_bytes_per_s())
    found.conditions["rounds"] = f"{rounds}, each with a prompt of its own"
    found.conditions["prompts"] = f"{_TAIL_TOKENS} tokens longer than said"
    found.conditions["through"] = "LLM.generate, both engines on all cores"
    teller.step("a model is made and the engines start")
    with _engines(args, folder, lengths[-1]) as handed:
        teller.expect(rounds * sum(lengths))
        numbers_of_run = random.Random(0)
        for _ in range(2):  # what runs for the first time is slower
            handed.round(numbers_of_run.choices(shape.words, k=_WARM_TOKENS))
        for turn in range(rounds):
            for length in lengths:
                teller.step(f"{length} tokens: round {turn + 1} of {rounds}", length)
                time.sleep(_SETTLE_S)
                tokens = numbers_of_run.choices(shape.words, k=length + _TAIL_TOKENS)
                for way, sample in handed.round(tokens, alone_first=turn % 2 == 0).items():
                    found.add(way, length, sample)
    found.conditions["load after"] = load_average()
    if not found.samples:
        raise ProgramError("nothing was measured")
    return handoff_report(found)


@contextlib.contextmanager
def _engines(args: argparse.Namespace, folder: Path, longest: int) -> Iterator[Handed]:
    shape = SHAPES[args.model]
    held = shape.kv_bytes_per_token * longest
    most_tokens = longest + BLOCK_TOKENS
    checkpoint = write_checkpoint(shape, most_tokens, folder / "model")
    environment = engine_environment(folder, 1 + (2 * held >> 30))
    with contextlib.ExitStack() as stack:
        room = private_warehouse(None, 2 * held + _SPARE_BYTES, 0)
        warehouse = stack.enter_context(room)

        def started(role: str) -> Engine:
            transfer = warehouse_transfer(warehouse.address, role)
            options = engine_options(checkpoint, most_tokens, _STEP_TOKENS, transfer)
            engine: Engine = Offline(options, environment, folder)
            return stack.enter_context(engine)

        yield Handed(started("kv_producer"), started("kv_consumer"), warehouse, _SETTLE_S)


if __name__ == "__main__":
    sys.exit(main())

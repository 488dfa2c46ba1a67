"""Time to first token by prompt length: recomputed, from vLLM's prefix cache, from the warehouse's
DRAM and NVMe, and from vLLM's own offloading to memory and files.

    .venv-vllm/bin/python bench/vllm_ttft.py --help
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvwarehouse.report.report import Report
from kvwarehouse_bench.harness.alternation import rotated
from kvwarehouse_bench.harness.frame import BenchProgress
from kvwarehouse_bench.micro.conditions import load_average
from kvwarehouse_bench.micro.load import copy_bytes_per_s
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS, SHAPES, TAIL_TOKENS, write_checkpoint
from kvwarehouse_bench.vllm.contenders import (
    EngineContender,
    PeerContender,
    WarehouseContender,
    offload_region,
)
from kvwarehouse_bench.vllm.engine import (
    SETTLE_S,
    Offline,
    VllmEngine,
    engine_environment,
    engine_options,
    peer_transfer,
    warehouse_transfer,
)
from kvwarehouse_bench.vllm.frame import Prompts, bench_parser, conditions, numbers, run
from kvwarehouse_bench.vllm.results import TtftResults
from kvwarehouse_bench.vllm.serving import VllmServing
from kvwarehouse_bench.vllm.ttft_report import ttft_report
from kvwarehouse_bench.vllm.warehouse import private_warehouse

ABOUT = """\
Time to first token: one prompt at a time, one token generated, wall time. Both engines run at once
and take turns within each round, so whatever else the machine does meets both, and each round gives
one ratio. Every sample is checked against vLLM's own count of where the prompt's tokens came from.

  recomputed        nothing is reused
  prefix cache      vLLM's own cache, in the engine's memory: the least that any reuse can cost
  warehouse DRAM    the engine's cache emptied, the KV in the daemon's DRAM
  warehouse NVMe    and evicted from its DRAM too
  peer CPU tier     vLLM's OffloadingConnector (TieringOffloadingSpec), its memory
  peer file tier    and its `fs` tier, its memory emptied

The model is made on the spot with random weights; nothing is downloaded."""

EXAMPLES = """\
  bench/vllm_ttft.py                            all lengths; 20 to 30 minutes on two cores
  bench/vllm_ttft.py --quick
  bench/vllm_ttft.py --lengths 1024,4096 --rounds 9 --json ttft.json --html ttft.html --png ttft.png
  bench/vllm_ttft.py --serve --no-peer          through `vllm serve` and HTTP streaming
  bench/vllm_ttft.py --dir /nvme/scratch        the disk to measure"""

_PROMPTS = Prompts("64,256,1024,2048,4096,8192,16384", "64,512,2048", rounds=5, quick_rounds=3)
_STEP_TOKENS = 2048
_WARM_TOKENS = 256
_SPARE_BYTES = 256 << 20


def main() -> int:
    parser = bench_parser("vllm_ttft", ABOUT, EXAMPLES)
    _PROMPTS.add_to(parser)
    parser.add_argument(
        "--tail",
        type=int,
        default=TAIL_TOKENS,
        metavar="N",
        help="Tokens of a prompt behind those, in a block that is not whole. 0: prompts of whole"
        f" blocks, the last of which vLLM's own cache computes again. Default: {TAIL_TOKENS}.",
    )
    parser.add_argument("--no-peer", action="store_true", help="Only ours.")
    parser.add_argument(
        "--serve", action="store_true", help="Through `vllm serve` instead of LLM.generate."
    )
    parser.add_argument(
        "--load",
        choices=("worth", "always"),
        default="worth",
        help="kvwarehouse.load. Default: worth, as users have it.",
    )
    return run(parser, measure)


def measure(args: argparse.Namespace, folder: Path, teller: BenchProgress) -> Report:
    lengths, rounds = _PROMPTS.chosen(args)
    numbers(str(args.tail), "--tail", 0, BLOCK_TOKENS - 1)
    shape = SHAPES[args.model]
    found = TtftResults(
        shape, lengths, conditions(args.model, shape), copy_bytes_per_s(), args.tail
    )
    found.conditions["rounds"] = f"{rounds}, ways and engines in turns"
    found.conditions["prompts"] = f"{args.tail} tokens longer than said" if args.tail else "as said"
    found.conditions["through"] = "vllm serve" if args.serve else "LLM.generate"
    teller.step("a model is made and the engines start")
    with _sides(args, folder, found, lengths[-1]) as sides:
        numbers_of_run = random.Random(0)
        total = sum(lengths) * (rounds + 1) * len(sides)
        teller.expect(total)
        _warm(sides, shape.prompt(_WARM_TOKENS, numbers_of_run))
        for length in lengths:
            prompt = shape.prompt(length + args.tail, numbers_of_run)
            for side in sides:
                teller.step(f"{length} tokens: stored", length)
                side.prepare(prompt)
            turns = [(turn, side) for turn in range(rounds) for side in rotated(sides, turn)]
            for turn, side in turns:
                teller.step(f"{length} tokens: round {turn + 1} of {rounds}", length)
                time.sleep(SETTLE_S)
                for way in rotated(list(side.ways), turn):
                    found.add(way, length, side.ways[way](prompt))
    found.conditions["load after"] = load_average()
    return ttft_report(found)


def _warm(sides: Sequence[EngineContender], prompt: Sequence[int]) -> None:
    """What runs for the first time is slower."""
    for side in sides:
        side.prepare(prompt)
        for way in side.ways.values():
            way(prompt)


@contextlib.contextmanager
def _sides(
    args: argparse.Namespace, folder: Path, found: TtftResults, longest: int
) -> Iterator[list[EngineContender]]:
    """The engines, ready; the peer's after ours."""
    shape = found.shape
    held = shape.kv_bytes_per_token * longest
    most_tokens = longest + BLOCK_TOKENS
    checkpoint = write_checkpoint(shape, most_tokens, folder / "model")
    environment = engine_environment(folder, 1 + (2 * held >> 30))
    kind: type[VllmServing | Offline] = VllmServing if args.serve else Offline
    with contextlib.ExitStack() as stack:

        def started(transfer: dict[str, object]) -> VllmEngine:
            options = engine_options(checkpoint, most_tokens, _STEP_TOKENS, transfer)
            engine: VllmEngine = kind(options, environment, folder)
            return stack.enter_context(engine)

        warehouse = stack.enter_context(
            private_warehouse(folder / "nvme", 2 * held + _SPARE_BYTES, 4 * held + (1 << 30))
        )
        found.conditions["disk"] = (
            "direct I/O" if warehouse.direct else "no direct I/O here: the page cache is measured"
        )
        ours = started(warehouse_transfer(warehouse.address, load=args.load))
        sides: list[EngineContender] = [WarehouseContender(ours, warehouse)]
        if not args.no_peer:
            files = folder / "files"
            files.mkdir()
            engine_id = stack.enter_context(offload_region())
            transfer = peer_transfer(engine_id, 2 * held + _SPARE_BYTES, files)
            sides.append(PeerContender(started(transfer), files))
        yield sides


if __name__ == "__main__":
    sys.exit(main())

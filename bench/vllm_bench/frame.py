"""The frame of all benches, and what those with an engine have besides: a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench_frame import frame
from bench_frame.frame import Measure, numbers
from bench_frame.progress import Teller
from kvwarehouse.planner.report import Report
from vllm_bench.checkpoint import SHAPES

__all__ = ["bench_parser", "numbers", "run"]


def bench_parser(name: str, about: str, examples: str) -> argparse.ArgumentParser:
    parser = frame.bench_parser(name, about, examples)
    parser.add_argument(
        "--model",
        choices=sorted(SHAPES),
        help="Which llama of random weights. Default: 80m; with --quick tiny.",
    )
    return parser


def run(parser: argparse.ArgumentParser, measure: Measure) -> int:
    def with_model(args: argparse.Namespace, folder: Path, teller: Teller) -> Report:
        args.model = args.model or ("tiny" if args.quick else "80m")
        return measure(args, folder, teller)

    return frame.run(parser, with_model)

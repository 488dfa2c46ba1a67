"""What a bench hands out: tables on stdout, and on request JSON, a page and a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from kvwarehouse.cli.output import print_report
from kvwarehouse.errors import UsageError
from kvwarehouse.report.report import Plot, Report
from kvwarehouse_bench.harness.bitmap import write_png


def add_answer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="Also write all figures, every round.")
    parser.add_argument("--html", metavar="FILE", help="Also write one self-contained page.")
    parser.add_argument("--png", metavar="FILE", help="Also write the first plot as a picture.")


def give(report: Report, args: argparse.Namespace) -> None:
    """Prints and writes. Raises UsageError where a file cannot be written."""
    if args.json is not None:
        text = json.dumps(report.figures, indent=1)
        _written(args.json, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    plots = [block for block in report.blocks if isinstance(block, Plot)]
    if args.png is not None and plots:
        _written(args.png, lambda path: write_png(plots[0], path))
    print_report(report, argparse.Namespace(html=args.html, json=False))


def check_paths(args: argparse.Namespace) -> None:
    """Before an hour of measuring, not after it."""
    for name in (args.json, args.html, args.png):
        if name is not None and not Path(name).resolve().parent.is_dir():
            raise UsageError(
                f"{name} is in a folder that does not exist; make it first", code="bad_path"
            )


def _written(name: str, write: Callable[[Path], object]) -> None:
    try:
        write(Path(name))
    except OSError as error:
        raise UsageError(
            f"{name} cannot be written: {error.strerror or error}", code="bad_path"
        ) from error

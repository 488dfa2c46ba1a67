"""What a GPU makes of the warehouse, beside the machine's own limits: make bench-gpu.

.venv-gpu/bin/python bench/gpu.py --help
"""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata
from pathlib import Path

from bench_frame.frame import bench_parser, numbers, run
from bench_frame.progress import Teller
from gpu_bench import hbm as hbm_part
from gpu_bench.cards import TorchCard
from gpu_bench.nvme import nvme
from gpu_bench.page import with_outcomes
from gpu_bench.pinned import Work, pinned
from gpu_bench.ttft import SHAPES, ttft
from gpu_bench.wanted import Outcome, lines_of
from kvwarehouse.cli.bench.conditions import processor
from kvwarehouse.gpu import Machine, look
from kvwarehouse.planner.report import Report, TableBlock

ABOUT = """\
Judges each figure against its goal. Without a GPU it measures nothing and says so, in the document
too."""

EXAMPLES = """\
  bench/gpu.py                      all parts: about half an hour, a model of 8 billion
  bench/gpu.py --quick              a small model and little data: to see that it works
  bench/gpu.py --lengths 1024,32768 --rounds 5 --write"""

_DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"
_LENGTHS, _QUICK_LENGTHS = "1024,4096,16384,32768,65536,131072", "1024,2048"
_STORED_BYTES, _QUICK_BYTES = 4 << 30, 128 << 20
_PACKAGES = ("torch", "transformers", "cupy-cuda13x", "kvikio-cu13", "nvidia-cufile")


def main() -> int:
    parser = bench_parser("gpu", ABOUT, EXAMPLES)
    parser.add_argument("--lengths", metavar="N,N", help=f"Prompts' tokens. Default: {_LENGTHS}.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="Default: %(default)s.")
    parser.add_argument("--model", choices=SHAPES, help="Default: 8b, with --quick tiny.")
    parser.add_argument("--write", action="store_true", help="Also docs/gpu.md.")
    return run(parser, _measure)


def _measure(args: argparse.Namespace, folder: Path, teller: Teller) -> Report:
    machine = look(folder=str(folder))
    conditions = conditions_of(machine)
    stored = _QUICK_BYTES if args.quick else _STORED_BYTES
    outcomes = [
        _pinned(args, machine, folder / "pinned"),
        _hbm(args, machine, folder / "hbm"),
        nvme(machine, folder / "nvme", stored),
        _ttft(args, machine, folder / "ttft"),
    ]
    if args.write:
        text = with_outcomes(_DOCUMENT.read_text("utf-8"), conditions, machine.words(), outcomes)
        _DOCUMENT.write_text(text, encoding="utf-8")
    rows = lines_of(outcomes)
    return Report(
        title="The warehouse with a GPU",
        summary=" ".join(machine.words()),
        blocks=[
            TableBlock("conditions", ("", ""), list(conditions.items())),
            TableBlock("figures", ("figure", "goal", "measured", "verdict"), rows),
        ],
        figures={"conditions": conditions, "figures": [list(row) for row in rows]},
        notes=(),
    )


def _pinned(args: argparse.Namespace, machine: Machine, folder: Path) -> Outcome:
    if not machine.has_device:
        return Outcome("pinned", why_not=machine.words()[0])
    work = Work(64 << 20, rounds=1) if args.quick else Work(rounds=args.rounds)
    return pinned(TorchCard(), folder, work)


def _hbm(args: argparse.Namespace, machine: Machine, folder: Path) -> Outcome:
    if not machine.has_device:
        return Outcome("hbm", why_not=machine.words()[0])
    quick = hbm_part.Work(64 << 20, rounds=1)
    work = quick if args.quick else hbm_part.Work(rounds=args.rounds)
    return hbm_part.hbm(TorchCard(), folder, work)


def _ttft(args: argparse.Namespace, machine: Machine, folder: Path) -> Outcome:
    if not machine.has_device:
        return Outcome("ttft", why_not=machine.words()[0])
    lengths = numbers(
        args.lengths or (_QUICK_LENGTHS if args.quick else _LENGTHS), "--lengths", 1024, 1 << 20
    )
    shape = SHAPES[args.model or ("tiny" if args.quick else "8b")]
    return ttft("cuda", shape, lengths, 1 if args.quick else args.rounds, folder)


def conditions_of(machine: Machine) -> dict[str, str]:
    return {
        "machine": f"{processor()}, {', '.join(machine.devices) or 'no GPU'}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "driver": f"CUDA {machine.cuda}" if machine.cuda else "none",
        "packages": ", ".join(_versions()) or "none of " + ", ".join(_PACKAGES),
    }


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())

"""From arguments to an exit status, the same for every bench: options that all have, a folder that
goes away again, errors as one line."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvwarehouse.cli.exit_codes import Exit, exit_code_of
from kvwarehouse.errors import UsageError, WarehouseError
from kvwarehouse.report.report import Report
from kvwarehouse_bench.harness.answer import add_answer, check_paths, give
from kvwarehouse_bench.harness.process import ProgramError
from kvwarehouse_bench.harness.progress import Teller

Measure = Callable[[argparse.Namespace, Path, Teller], Report]


def bench_parser(name: str, about: str, examples: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"bench/{name}.py",
        description=about,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quick", action="store_true", help="A minute or two to see that all works: no figures."
    )
    parser.add_argument(
        "--dir",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="On the disk to measure; what is written there is removed. Default: %(default)s.",
    )
    add_answer(parser)
    return parser


def run(parser: argparse.ArgumentParser, measure: Measure) -> int:
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.INTERRUPTED))  # what was made, goes
    try:
        check_paths(args)
        with _folder(args.dir) as folder, Teller() as teller:
            report = measure(args, Path(folder), teller)
        give(report, args)
    except WarehouseError as error:
        print(f"{parser.prog}: {error} [{error.code}]", file=sys.stderr)
        return exit_code_of(error)
    except ProgramError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return Exit.OK


def numbers(text: str, name: str, least: int, most: int) -> list[int]:
    """Of a list with commas; in rising order."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"{name} {text}: not a list of numbers", code="bad_bench") from None
    if not least <= found[0] <= found[-1] <= most:
        raise UsageError(f"{name} {text}: out of range; use {least} to {most}", code="bad_bench")
    return found


def _folder(base: str) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="kvw-bench-", dir=base)
    except OSError as error:
        raise UsageError(f"--dir {base}: {error.strerror or error}", code="bad_bench") from error

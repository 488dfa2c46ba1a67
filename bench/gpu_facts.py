"""What this project counts on in CUDA's driver, and its contract model imitates, asked of this
machine's driver: a line a fact.

    python3 bench/gpu_facts.py --help

Needs the standard library alone; the last part uses torch where it is."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Final

from kvwarehouse_bench.gpu.facts.capturing import captures
from kvwarehouse_bench.gpu.facts.copying import batches, copies
from kvwarehouse_bench.gpu.facts.device import attributes, calls, contexts, opened
from kvwarehouse_bench.gpu.facts.driver import (
    MIB,
    NO_DEVICE,
    STUB_LIBRARY,
    CudaDriver,
    CudaDriverError,
    DriverCard,
    say,
)
from kvwarehouse_bench.gpu.facts.memory import registered, shared

ABOUT = """\
Asks CUDA's driver what the warehouse counts on. Each part is tried by itself. Ends with 1 where one
failed, and with 77 where there is no driver or no device: nothing was asked."""
EPILOG = """\
KVW_CUDA_DRIVER names another library than libcuda.so.1: the contract model, to try this program."""

_SKIPPED: Final = 77
"""As test harnesses have it."""
_MODEL: Final = "KVW_CUDA_DRIVER"
_MOVED_BYTES, _QUICK_MOVED_BYTES = 256 * MIB, 4 * MIB


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu_facts.py", description=ABOUT, epilog=EPILOG)
    parser.add_argument(
        "--dir",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="On a disk: whose files are registered. Default: %(default)s.",
    )
    parser.add_argument("--quick", action="store_true", help="Little data: to see that it works.")
    args = parser.parse_args()
    try:
        card = opened(CudaDriver(os.environ.get(_MODEL, "libcuda.so.1")))
    except CudaDriverError as error:
        nothing = error.result in (NO_DEVICE, STUB_LIBRARY)
        print(f"gpu facts: {'no GPU here: ' if nothing else ''}{error}", file=sys.stderr)
        return _SKIPPED if nothing else 1
    size = _QUICK_MOVED_BYTES if args.quick else _MOVED_BYTES
    parts: dict[str, Callable[[DriverCard], None]] = {
        "attributes": attributes,
        "shared": shared,
        "registered": partial(registered, disk=args.dir, size_bytes=size),
        "calls": calls,
        "contexts": contexts,
        "copies": partial(copies, total_bytes=size),
        "batches": partial(batches, total_bytes=size),
    }
    if _MODEL not in os.environ:
        parts["captures"] = captures
    # All of them, whatever the first make of it.
    ended = [_tried(name, part, card) for name, part in parts.items()]
    return 0 if all(ended) else 1


def _tried(name: str, part: Callable[[DriverCard], None], card: DriverCard) -> bool:
    try:
        part(card)
    except Exception as error:  # noqa: BLE001 - whatever it was, the other facts are asked for
        say(name, "FAILED", type(error).__name__, error)
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

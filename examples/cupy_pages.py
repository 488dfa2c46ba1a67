"""Computes once and loads ever after, in the memory of a GPU, with CuPy (docs/gpu.md).

    pip install 'kvwarehouse[daemon,gpu]'
    python examples/cupy_pages.py                                # with a daemon of its own
    python examples/cupy_pages.py --address unix:///path/kvw.sock

A conversation grows turn by turn. Each turn loads the pages of the longest prefix that is stored,
computes the others by kernels on a stream of its own, and stores what it computed. Nothing is
synchronised on the way: loads and stores come after what the current stream has queued, and what
was loaded is there when the call returns.

Needs a GPU; says so and ends with status 1 where there is none.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

import kvwarehouse as kvw

PAGE_TOKENS = 64
PAGE_BYTES = 1 << 20
TURNS, TURN_PAGES = 4, 16

SPACE = kvw.Namespace(
    model="example",
    weights=kvw.fingerprint("what the weights are"),
    dtype="uint8",
    layout="cupy-pages/1",
    page_tokens=PAGE_TOKENS,
    page_bytes=PAGE_BYTES,
)


def compute(xp: Any, tokens: Any, first: int) -> Any:
    """Stands in for a model's prefill: pages from `first` on, each of all tokens up to its end.
    xp: cupy, or numpy."""
    ends = np.cumsum(tokens, dtype=np.uint64)[PAGE_TOKENS - 1 :: PAGE_TOKENS]
    words = xp.arange(PAGE_BYTES // 8, dtype=xp.uint64)
    return (xp.asarray(ends[first:])[:, None] * (words + 1)).view(xp.uint8)


def turn(xp: Any, ns: kvw.OpenNamespace, tokens: Any) -> tuple[Any, int]:
    """The pages of all tokens, and how many of them were not computed."""
    pages = xp.empty((len(tokens) // PAGE_TOKENS, PAGE_BYTES), xp.uint8)
    reused = int(ns.load(tokens, pages))
    if reused < len(pages):
        pages[reused:] = compute(xp, tokens, reused)
        print("  ", ns.store(tokens, pages[reused:], first=reused))
    return pages, reused


def converse(xp: Any, client: kvw.Client) -> None:
    ns = client.open(SPACE)
    said = np.random.default_rng().integers(1, 50_000, TURNS * TURN_PAGES * PAGE_TOKENS)
    for number in range(1, TURNS + 1):
        tokens = said[: number * TURN_PAGES * PAGE_TOKENS]
        pages, reused = turn(xp, ns, tokens)
        held = pages if xp is np else xp.asnumpy(pages)
        right = np.array_equal(held, compute(np, tokens, 0))
        print(f"turn {number}: {len(pages)} pages, {reused} reused, right: {right}")
        if not right:
            sys.exit("these are other bytes than were computed")


def cupy_or_exit() -> Any:
    try:
        import cupy
    except ImportError as error:
        sys.exit(f"this example needs CuPy, pip install 'kvwarehouse[gpu]': {error}")
    if not cupy.cuda.is_available():
        sys.exit("this example needs a GPU that CuPy can use; cupy.cuda.is_available() is False")
    return cupy


def warehouse(address: str | None) -> AbstractContextManager[kvw.Client]:
    return kvw.embedded(dram="512MiB") if address is None else kvw.connect(address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", help="of a daemon on this host; default: one of its own")
    address = parser.parse_args().address
    cupy = cupy_or_exit()
    with warehouse(address) as client, cupy.cuda.Stream(non_blocking=True):
        converse(cupy, client)


if __name__ == "__main__":
    main()

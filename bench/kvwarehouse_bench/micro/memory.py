"""Memory a page takes beside its payload: the daemon's own, beyond what it has without pages; the
index; and the slots' words and metadata. Small pages, because that is where it matters; a daemon
for each count of them, its index sized for them."""

from __future__ import annotations

from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse_bench.micro.figures import Curve, Figure
from kvwarehouse_bench.micro.filled import filled_daemon
from kvwarehouse_bench.micro.options import PAGE_TOKENS, Options
from kvwarehouse_bench.micro.private import private_daemon
from kvwarehouse_bench.micro.process import private_bytes, taken_bytes

_CHAIN = 100
_EMPTY_DRAM_BYTES = 32 << 20
BOUND_BYTES = 448 + 4 * PAGE_TOKENS + 8
"""Of a page with one shard."""


def measure(options: Options) -> list[Figure | Curve]:
    counts = options.sizes.stored
    with private_daemon({"dram": _EMPTY_DRAM_BYTES, "index_pages": counts[0]}) as (daemon, _):
        empty = private_bytes(daemon.pid)
    a_page = {pages: _bytes_a_page(pages, empty) for pages in counts}
    most = counts[-1]
    return [
        Figure(
            f"memory beside the payload, {most:,} pages of {PAGE_TOKENS} tokens",
            sum(a_page[most].values()),
            "bytes a page",
            goal=f"under {BOUND_BYTES + 1} bytes a page",
        ),
        *(
            Curve("memory beside the payload", part, "pages", "bytes a page",
                  [(pages, a_page[pages][part]) for pages in counts])
            for part in a_page[most]
        ),
    ]  # fmt: skip


def _bytes_a_page(pages: int, empty_bytes: int) -> dict[str, float]:
    # Short chains, because a full index loses a page here and there, and its chain with it.
    with filled_daemon(pages, index_pages=pages, chain_pages=_CHAIN) as filled:
        own = private_bytes(filled.daemon.pid) - empty_bytes
        parts = {"daemon's own": own, **shared_bytes(filled.daemon)}
    return {part: size / filled.pages for part, size in parts.items()}


def shared_bytes(daemon: PrivateDaemon) -> dict[str, int]:
    """Of shared memory, what grows with the pages and is not their payload; the index whole, as it
    is taken at the start."""
    folder = daemon.arena_dir
    return {"index": taken_bytes(folder, "index.*"), "slots": taken_bytes(folder, "slots")}

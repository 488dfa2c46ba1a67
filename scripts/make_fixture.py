#!/usr/bin/env python3
"""Makes tests/fixtures/format-N.tar.xz: what a daemon of this source tree leaves on disk and in
shared memory when it is killed. tests/fault/test_previous_format.py opens it with a later daemon.

    .venv/bin/python scripts/make_fixture.py tests/fixtures/format-1.tar.xz

Make a new one, beside the old ones, whenever a format changes; never make an old one again.

Inside: `arena/` and `nvme/`, zeros at the end of files cut off, and `facts.json`, which has the
files' sizes, the daemon's settings and what is stored: for each namespace its fields, its pages
(nodes of harness/pages.py, by tokens or by an engine's keys), in which tiers they are.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

import kvwarehouse as kvw
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.pages import pages_of
from kvwarehouse_bench.harness.serving import Serving

SETTINGS: Final = {
    "dram": "8MiB", "nvme_capacity": "1MiB", "nvme_segment": "128KiB", "index_pages": "1024",
    "flush_interval_s": "0.05",
}  # fmt: skip
PAGE_BYTES: Final = 200  # small: noise does not compress

BY_TOKENS: Final = kvw.Namespace(
    model="tokens", weights="w", dtype="uint8", layout="t/1", page_tokens=2, page_bytes=PAGE_BYTES,
    shards=2,
)  # fmt: skip
BY_KEYS: Final = kvw.Namespace(
    model="keys", weights="w", dtype="uint8", layout="t/1", page_tokens=16, page_bytes=PAGE_BYTES
)
CLEARED: Final = kvw.Namespace(
    model="cleared", weights="w", dtype="uint8", layout="t/1", page_tokens=2, page_bytes=PAGE_BYTES
)
NODES: Final = list(range(1, 25))
UNFINISHED: Final = [100, 101]  # shard 0 alone was stored

WRITER: Final = """
space = kvw.Namespace(**given["space"])
nodes = given["nodes"]
tokens = [token for node in nodes for token in (node, node)]
result = client.open(space).store(tokens, pages_of(nodes, 0, 0, space.page_bytes))
say(result.stored)
hear()
"""


def tokens(nodes: list[int]) -> list[int]:
    return [token for node in nodes for token in (node, node)]


def keys(nodes: list[int]) -> list[bytes]:
    return [bytes([node]) * 32 for node in nodes]


def fill(client: kvw.Client) -> list[dict[str, Any]]:
    """Stores, clears and evicts; what is there afterwards."""
    cleared = client.open(CLEARED)
    assert cleared.store(tokens(NODES[:4]), pages_of(NODES[:4], 0, 0, PAGE_BYTES)).stored == 4
    assert client.flush().pending == 0
    assert client.clear(CLEARED) == 4
    spaces = client.open(BY_TOKENS), client.open(BY_KEYS)
    for shard in (0, 1):
        result = spaces[0].store(tokens(NODES), pages_of(NODES, shard, 0, PAGE_BYTES), shard)
        assert result.stored == len(NODES)
    result = spaces[1].store(keys=keys(NODES), pages=pages_of(NODES, 0, 0, PAGE_BYTES))
    assert result.stored == len(NODES)
    assert client.flush() == kvw.FlushResult(flushed=2 * len(NODES), not_admitted=0, pending=0)
    # From both tiers, which leaves tombstones; then some from DRAM alone.
    assert client.evict(BY_KEYS, 4, "all") == 4
    assert client.evict(BY_KEYS, 6, "dram") == 6
    return [
        {"fields": BY_TOKENS.to_fields(), "nodes": NODES, "by": "tokens", "dram": len(NODES)},
        {"fields": BY_KEYS.to_fields(), "nodes": NODES[:-4], "by": "keys", "dram": len(NODES) - 10},
        {"fields": CLEARED.to_fields(), "nodes": [], "by": "tokens", "dram": 0},
    ]


def pack(to: Path, folders: dict[str, Path], facts: dict[str, Any]) -> None:
    facts["sizes"] = {}
    with tarfile.open(to, "w:xz", preset=9) as archive:
        for name, folder in folders.items():
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    place = f"{name}/{path.relative_to(folder)}"
                    facts["sizes"][place] = path.stat().st_size
                    add(archive, place, path.read_bytes().rstrip(b"\0"))
        add(archive, "facts.json", json.dumps(facts, indent=1).encode())


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o600
    archive.addfile(entry, io.BytesIO(data))


def main(argument: str) -> int:
    with tempfile.TemporaryDirectory() as disk, Serving(Path(disk), **SETTINGS) as serving:
        with serving.connect(timeout_s=60) as client:
            stored = fill(client)
            given = {"space": BY_TOKENS.to_fields(), "nodes": UNFINISHED}
            with ClientProcess(serving.address, WRITER, **given) as writer:
                assert writer.hear() == len(UNFINISHED)
                serving.kill()  # with a reservation open, and sessions of clients that live
        facts = {"settings": SETTINGS, "stored": stored, "unfinished": UNFINISHED}
        folders = {"arena": serving.arena_dir, "nvme": serving.nvme_dir}
        pack(Path(argument), folders, facts)
    print(f"{argument}: {Path(argument).stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Backups between two daemons: what is stored, moved and looked at again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvwarehouse as kvw
from kvwarehouse.backup import (
    BackupReader,
    BackupWriter,
    Export,
    ExportCounts,
    Import,
    ImportCounts,
    RateLimit,
    Target,
    new_file,
)
from kvwarehouse.backup.room import MayLeave
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving

PAGE_BYTES = 20_000  # no multiple of a block: shards are padded
PAGE_TOKENS = 4
WAIT_S = 60.0


def space(model: str = "moved", **fields: Any) -> kvw.Namespace:
    kept = {"weights": "w", "dtype": "uint8", "layout": "test/1"}
    shape = {"page_tokens": PAGE_TOKENS, "page_bytes": PAGE_BYTES, "shards": 1}
    return kvw.Namespace(model, **{**kept, **shape, **fields})


SHARDED = space("sharded", shards=3)
LORA = space(adapter="lora-7")
SALTED = space(salt="tenant secret")
KEYED = space("keyed", hash_scheme="engine/1", shards=2)
ALL = (space(), SHARDED, LORA, SALTED, KEYED)


class Prompt(NamedTuple):
    """`pages` of it; the first `shared` are those of chain 0."""

    pages: int
    chain: int = 0
    shared: int = 0

    @property
    def nodes(self) -> list[int]:
        own = [self.chain << 20 | page for page in range(self.shared, self.pages)]
        return [*range(self.shared), *own]

    def prefix(self, space: kvw.Namespace) -> dict[str, Any]:
        if space.hash_scheme == "engine/1":
            return {"keys": [b"%d" % node for node in self.nodes]}
        return {"tokens": np.repeat(np.array(self.nodes, np.uint32), PAGE_TOKENS)}


PROMPTS = (Prompt(12), Prompt(20, 1, 5), Prompt(7, 2, 5), Prompt(1, 3))


def store(client: kvw.Client, space: kvw.Namespace, *prompts: Prompt) -> None:
    """All shards of some pages, then of the next, as ranks do it side by side."""
    opened = client.open(space)
    for prompt in prompts or PROMPTS:
        for first in range(0, prompt.pages, 25):
            some = prompt._replace(pages=min(first + 25, prompt.pages))
            for shard in range(space.shards):
                pages = pages_of(some.nodes[first:], shard, 0, space.page_bytes)
                place: dict[str, Any] = {"shard": shard, "first": first, "timeout_s": WAIT_S}
                assert not opened.store(**some.prefix(space), pages=pages, **place).dropped


def check(client: kvw.Client, space: kvw.Namespace, *prompts: Prompt) -> None:
    """All of them are there, as they were stored."""
    opened = client.open(space)
    for prompt in prompts or PROMPTS:
        assert opened.lookup(**prompt.prefix(space)).pages == prompt.pages
        for shard in range(space.shards):
            out = np.zeros((prompt.pages, space.page_bytes), np.uint8)
            loaded = opened.load(**prompt.prefix(space), out=out, shard=shard, timeout_s=WAIT_S)
            assert loaded == prompt.pages
            check_pages(out, prompt.nodes, shard, 0)


def pages_at(client: kvw.Client) -> int:
    return int(client.status()["core"]["index"]["pages"])


Hook = Callable[[], object]


class Spent(RateLimit):
    """Counts what it is told, and waits for nothing."""

    def __init__(self) -> None:
        super().__init__(None)
        self.bytes = 0

    def spend(self, size_bytes: int) -> None:
        self.bytes += size_bytes


def exported(
    client: kvw.Client,
    path: Path,
    *,
    tier: str | None = None,
    after_first: Hook | None = None,
    rate: RateLimit | None = None,
    timeout_s: float = WAIT_S,
) -> ExportCounts:
    """after_first: done once the first window is written."""
    spaces = client.namespaces()
    export = Export(client, tier=tier, rate=rate or RateLimit(None), timeout_s=timeout_s)
    with new_file(str(path)) as file:
        writer = BackupWriter(file, "00" * 16, spaces)
        for number, _ in enumerate(export.run(writer, spaces)):
            if number == 0 and after_first is not None:
                after_first()
        writer.end()
    return export.counts


def imported(  # noqa: PLR0913  what it is tried with
    client: kvw.Client,
    path: Path,
    *,
    evict: MayLeave = "none",
    salts: tuple[str, ...] = (SALTED.salt,),
    after_first: Hook | None = None,
    in_window: Hook | None = None,
    rate: RateLimit | None = None,
) -> ImportCounts:
    """in_window: done as the first window's pages are about to be stored."""
    with path.open("rb") as file:
        reader = BackupReader(file)
        target = Target(client, reader.namespaces, salts=salts)
        rate = rate or RateLimit(None)
        moved = Import(client, target, may_leave=evict, rate=rate, timeout_s=WAIT_S)
        if in_window is not None:
            moved._room = Interrupted(moved._room, in_window)  # type: ignore[assignment]
        for number, _ in enumerate(moved.run(reader)):
            if number == 0 and after_first is not None:
                after_first()
    return moved.counts


class Interrupted:
    """Room, and what happens when it is looked for the first time."""

    def __init__(self, room: Any, hook: Hook) -> None:
        self.take, self.settle = room.take, room.settle
        self._room = room
        self._hook: Hook | None = hook

    def look(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        self._room.look()


def connected(serving: Serving, how: str) -> kvw.Client:
    return serving.connect_remote() if how == "remote" else serving.connect()


def back_up(
    serving: Serving,
    path: Path,
    *spaces: kvw.Namespace,
    prompts: Sequence[Prompt] = PROMPTS,
    how: str = "local",
) -> ExportCounts:
    """Stores the prompts in each of the namespaces, then exports all that the daemon has."""
    with connected(serving, how) as client:
        for each in spaces:
            store(client, each, *prompts)
        return exported(client, path)


def to_nvme(client: kvw.Client) -> None:
    assert client.flush().pending == 0
    client.evict(None, 100_000, "dram")
    assert client.status()["core"]["tiers"]["dram"]["pages"] == 0


def command(*arguments: str, serving: Serving, **options: Any) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-P", "-m", "kvwarehouse", *arguments, "--socket", serving.socket]
    return subprocess.Popen(program, stderr=subprocess.PIPE, **options)

"""A prompt whose bytes are known, in a namespace of its own: stored, loaded with every byte
checked, and found in a daemon's files, to be damaged there.

    prompt = KnownPrompt("m", pages=12, page_bytes=20_000)
    prompt.store_whole(client)
    prompt.in_arena(serving, 5).flip()
    assert prompt.load(client) == 5

One page a token. Its tokens are 0, 1, 2...: two prompts with the same bytes differ by `model`.
Immutable; thread-safe.
"""

from __future__ import annotations

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_bench.harness.pages import Bytes, check_pages, page_of, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit import damage

_TIMEOUT_S = 60.0  # of what is to succeed on a machine that is busy


class KnownPrompt:
    """version: of the bytes, and a salt of the namespace."""

    def __init__(self, model: str, *, pages: int, page_bytes: int, version: int = 0) -> None:
        self.pages, self.page_bytes, self.version = pages, page_bytes, version
        self.nodes = list(range(pages))
        self.space = kvw.Namespace(
            model=model,
            weights="w",
            dtype="uint8",
            layout="t/1",
            page_tokens=1,
            page_bytes=page_bytes,
            salt=str(version) if version else "",
        )

    def store(self, client: kvw.Client) -> kvw.StoreResult:
        data = pages_of(self.nodes, 0, self.version, self.page_bytes)
        return client.open(self.space).store(self.nodes, data, timeout_s=_TIMEOUT_S)

    def store_whole(self, client: kvw.Client) -> None:
        result = self.store(client)
        assert result.stored == self.pages, f"not all was stored: {result}"

    def load(self, client: kvw.Client, first: int = 0) -> kvw.Loaded:
        """From page `first` on. AssertionError for a wrong byte."""
        out = np.zeros((self.pages - first, self.page_bytes), np.uint8)
        loaded = client.open(self.space).load(self.nodes, out, first=first, timeout_s=_TIMEOUT_S)
        check_pages(out[:loaded], self.nodes[first : first + loaded], 0, self.version)
        return loaded

    def in_arena(self, serving: Serving, node: int) -> damage.Place:
        return damage.find_one([serving.arena_dir / "arena"], self._page(node))

    def in_segments(self, serving: Serving, node: int) -> damage.Place:
        return damage.find_one(serving.segments, self._page(node))

    def _page(self, node: int) -> Bytes:
        return page_of(node, 0, self.version, self.page_bytes)

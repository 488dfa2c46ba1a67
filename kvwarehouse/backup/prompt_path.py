"""The way from the root to a page: the prompt that the page is the end of. One owner."""

from __future__ import annotations

from typing import Any

import numpy as np


class PromptPath:
    """Token ids or keys of pages, one after another. In pre-order a page's parent is on it."""

    def __init__(self) -> None:
        self._witnesses: list[bytes] = []
        self._by_tokens = True

    def cut(self, pages: int) -> None:
        """Forgets what lies below the first `pages` of them."""
        del self._witnesses[pages:]

    def add(self, witness: bytes, *, by_tokens: bool) -> None:
        """A page below the last. All of one path are named by tokens, or all by keys."""
        assert not self._witnesses or by_tokens == self._by_tokens
        self._by_tokens = by_tokens
        self._witnesses.append(witness)

    def prefix(self, pages: int | None = None) -> dict[str, Any]:
        """Of the first `pages`, as arguments of OpenNamespace.load and store: tokens or keys."""
        witnesses = self._witnesses[:pages]
        if not self._by_tokens:
            return {"keys": witnesses}
        return {"tokens": np.frombuffer(b"".join(witnesses), "<u4")}

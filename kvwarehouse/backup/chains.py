"""The pages of a namespace as a tree: a page, and below it the pages that follow it in some prompt.

They travel in pre-order, so that the way from the root to a page is all that a reader has to keep:
a page's parent is always on it. Not thread-safe. About 400 bytes a page and its token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from kvwarehouse.client.watch import PageChange


@dataclass(slots=True, eq=False)
class ChainPage:
    position: int
    witness: bytes
    """Token ids, packed uint32, little-endian; or the engine's key."""
    by_tokens: bool
    children: list[ChainPage] = field(default_factory=list)
    number: int = -1
    """In the file; -1: it is not there yet."""

    def below(self) -> int:
        """Pages of the tree that begins here, itself among them."""
        count, waiting = 0, [self]
        while waiting:
            count += 1
            waiting += waiting.pop().children
        return count


class Chains:
    """Filled by `add` with all that a watch says up to `synced`, a page after its parent."""

    def __init__(self, tier: str | None = None) -> None:
        """tier: leave out what is not there ("dram"); None: all that any tier has."""
        self._tier = tier
        self._pages: dict[bytes, ChainPage] = {}
        self._roots: list[ChainPage] = []
        self.left_out: Counter[str] = Counter()
        """By reason: "no_parent", its ancestor is in no tier, or was left out; "not_in_dram"."""

    @property
    def pages(self) -> int:
        return len(self._pages)

    def add(self, changes: Iterable[PageChange]) -> None:
        for change in changes:
            # What leaves meanwhile is found to be gone when it is loaded.
            if change.stored and change.key not in self._pages:
                self._add(change)

    def _add(self, change: PageChange) -> None:
        if self._tier is not None and self._tier not in change.tiers:
            self.left_out[f"not_in_{self._tier}"] += 1
            return
        by_tokens = not change.engine_key
        page = ChainPage(change.position, change.tokens or change.engine_key, by_tokens)
        if change.position == 0:
            self._roots.append(page)
        else:
            parent = self._pages.get(change.parent)
            if (
                parent is None
                or parent.position + 1 != page.position
                or parent.by_tokens != by_tokens
            ):
                self.left_out["no_parent"] += 1
                return
            parent.children.append(page)
        self._pages[change.key] = page

    def runs(self, most: int) -> Generator[list[ChainPage], int, None]:
        """Pages in pre-order, at most `most` at a time, each the parent of the next. Is sent how
        many of them were taken: below the first that was not, nothing is yielded."""
        self._pages.clear()
        waiting = self._roots[::-1]
        while waiting:
            run = [waiting.pop()]
            while len(run) < most and run[-1].children:
                run.append(run[-1].children[0])
            taken = yield run
            for place, page in enumerate(run[:taken]):
                others = page.children[1:] if place + 1 < len(run) else page.children
                waiting.extend(reversed(others))
                page.children = []  # nobody needs them any more

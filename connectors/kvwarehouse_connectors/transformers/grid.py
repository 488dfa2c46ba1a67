"""The grid of chunks on which prompts are computed.

The KV of a token is a function of the tokens before it, but its *bits* also depend on the shapes of
the matrices it was computed in. So prompts are computed in chunks that start at multiples of
`chunk_tokens`, whoever computes them, and only pages of full chunks are stored: then a loaded
prefix is bit for bit what computing it would have given, and so are the logits after it.

Immutable; thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import kvwarehouse as kvw


@dataclass(frozen=True)
class ChunkGrid:
    """chunk_tokens is a multiple of page_tokens, both positive. Raises UsageError (code "bad_grid")
    where it is not."""

    page_tokens: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        for name in ("page_tokens", "chunk_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise _bad(f"{name} = {value!r} is not a positive whole number")
        if self.chunk_tokens % self.page_tokens:
            raise _bad(
                f"chunk_tokens = {self.chunk_tokens} is not a multiple of page_tokens ="
                f" {self.page_tokens}; a page must lie inside one chunk"
            )

    def storable_tokens(self, prompt_tokens: int) -> int:
        """The tokens of a prompt in full chunks, whose pages may be stored."""
        return prompt_tokens // self.chunk_tokens * self.chunk_tokens

    def reusable_tokens(self, prompt_tokens: int, stored_tokens: int) -> int:
        """How much of a stored prefix a prompt can use: a whole number of chunks, and never the
        prompt's last one, which has to be computed for its logits."""
        usable = min(stored_tokens, prompt_tokens - 1)
        return max(0, usable) // self.chunk_tokens * self.chunk_tokens

    def chunks(self, start: int, prompt_tokens: int) -> Iterator[tuple[int, int]]:
        """(first token, end) of each chunk from `start`, a multiple of chunk_tokens, to the
        prompt's end. The last may be short."""
        for first in range(start, prompt_tokens, self.chunk_tokens):
            yield first, min(first + self.chunk_tokens, prompt_tokens)


def _bad(message: str) -> kvw.UsageError:
    return kvw.UsageError(message, code="bad_grid")

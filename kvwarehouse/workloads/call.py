"""One request of a workload: what a plan reads of it, and where it stands in its conversation.

Immutable; thread-safe. Block ids are chained as in the public traces: an equal id means an equal
prefix up to and including that block. That makes block sizes convertible, see `of_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvwarehouse.trace.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class WorkloadCall:
    """`chat` numbers the requests; `parent` is the one that it continues, -1 for none; `turn`
    counts from 1. `input_tokens` fill all of `blocks` but the last, and a part of that."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    chat: int = 0
    parent: int = -1
    turn: int = 1

    @property
    def request(self) -> TraceRequest:
        return TraceRequest(self.time_s, self.input_tokens, self.output_tokens, self.blocks)


class Workload(Protocol):
    """`calls` comes in the order of time and may have no end; called again it begins again."""

    @property
    def block_tokens(self) -> int: ...
    def calls(self) -> Iterator[WorkloadCall]: ...


class Ids:
    """Gives out block ids, each once. Not thread-safe."""

    def __init__(self) -> None:
        self.given = 0

    def take(self, count: int) -> list[int]:
        first, self.given = self.given, self.given + count
        return list(range(first, self.given))


def blocks_in(tokens: int, block_tokens: int) -> int:
    """Blocks that so many tokens take, the last one in part."""
    return -(-tokens // block_tokens)


def of_blocks(call: WorkloadCall, have_tokens: int, want_tokens: int) -> list[int]:
    """The ids of a call whose blocks are `have_tokens` long, for blocks of `want_tokens`; one is a
    multiple of the other. Larger blocks take the id of their last part, which stands for all before
    it; of a smaller block's id the larger one's is the quotient. A block that is not full shares
    nothing with the full block in its place, so smaller blocks may find a little less."""
    if want_tokens == have_tokens:
        return list(call.blocks)
    if want_tokens > have_tokens:
        ratio = want_tokens // have_tokens
        count = len(call.blocks)
        return [call.blocks[min(at + ratio, count) - 1] for at in range(0, count, ratio)]
    ratio = have_tokens // want_tokens
    finer = [block * ratio + part for block in call.blocks for part in range(ratio)]
    return finer[: blocks_in(call.input_tokens, want_tokens)]

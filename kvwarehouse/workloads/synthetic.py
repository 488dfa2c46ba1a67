"""Workloads that follow no trace, so that their hit rates follow by arithmetic.

DocumentQa asks questions about long documents, as LMCache's benchmark asks them: every document
once or more, in an order that is given. Nothing is drawn but the order.

Scan is a flood of prompts that share nothing: what must not push out of a cache what others use.
Its hit rate is 0, in a cache of any size.

Tiers are working sets around the size of a tier, each gone through more than once: the plainest
picture of what a tier holds. One set of 1.05 tiers and two passes is the public
prefix-suffix-tuner; several sets are a working-set sweep. A prompt is a prefix, a breaker of 32
tokens, and a suffix that is the same text in all: behind different prefixes it is different KV, so
a cache by prefix shares nothing between prompts. Through an LRU cache page by page a set that fits
is hit whole from the second pass on, and one that does not is never hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvwarehouse.workloads.call import Ids, WorkloadCall, blocks_in
from kvwarehouse.workloads.draws import Draws

ORDERS = ("tile", "interleave", "random")

BREAKER_TOKENS = 32


@dataclass(frozen=True)
class DocumentQa:
    """`order`: "tile" asks about all documents, then about all again; "interleave" asks all about
    one, then all about the next; "random" is any order. Requests come at even intervals.
    With `question_tokens` 0 all prompts about a document are the same, as in LMCache's."""

    seed: int
    documents: int
    document_tokens: int
    question_tokens: int
    queries: int
    order: str
    output_tokens: int
    requests_per_s: float
    block_tokens: int = 512

    def calls(self) -> Iterator[WorkloadCall]:
        ids = Ids()
        full = self.document_tokens // self.block_tokens
        total = self.document_tokens + self.question_tokens
        own = blocks_in(total, self.block_tokens) - full
        # Where there is no question the last block is the document's too.
        shared = full if self.question_tokens else full + own
        kept: dict[int, list[int]] = {}
        for chat, document in enumerate(self._asked()):
            if document not in kept:
                kept[document] = ids.take(shared)
            blocks = kept[document] + ids.take(full + own - shared)
            yield WorkloadCall(chat / self.requests_per_s, total, self.output_tokens, blocks, chat)

    def _asked(self) -> Iterator[int]:
        """The documents in the order of the questions."""
        count = self.documents * self.queries
        if self.order == "random":
            for place in Draws(self.seed, "document-qa").shuffled(count):
                yield place % self.documents
        elif self.order == "interleave":
            yield from (at // self.queries for at in range(count))
        else:
            yield from (at % self.documents for at in range(count))


@dataclass(frozen=True)
class Scan:
    """Without end, Poisson; all prompts of one length."""

    seed: int
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    block_tokens: int = 512

    def calls(self) -> Iterator[WorkloadCall]:
        draws, ids, time_s, chat = Draws(self.seed, "scan"), Ids(), 0.0, 0
        while True:
            time_s += draws.wait(1 / self.requests_per_s)
            blocks = ids.take(blocks_in(self.prompt_tokens, self.block_tokens))
            yield WorkloadCall(time_s, self.prompt_tokens, self.output_tokens, blocks, chat)
            chat += 1


@dataclass(frozen=True)
class TierSweep:
    """`sets`: the size of each set, as a multiple of a tier of `tier_blocks` blocks; whole prompts,
    so a set is up to a prompt larger. Requests come at even intervals."""

    tier_blocks: int
    sets: Sequence[float]
    passes: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    requests_per_s: float
    block_tokens: int = 512

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + BREAKER_TOKENS + self.suffix_tokens

    def prompts(self, size: float) -> int:
        """Of one set."""
        per_prompt = blocks_in(self.prompt_tokens, self.block_tokens)
        return max(1, blocks_in(round(self.tier_blocks * size), per_prompt))

    def calls(self) -> Iterator[WorkloadCall]:
        ids, chat = Ids(), 0
        per_prompt = blocks_in(self.prompt_tokens, self.block_tokens)
        for size in self.sets:
            first = ids.take(self.prompts(size) * per_prompt)[0]
            for _ in range(self.passes):
                for at in range(self.prompts(size)):
                    begin = first + at * per_prompt
                    blocks = range(begin, begin + per_prompt)
                    time_s = chat / self.requests_per_s
                    yield WorkloadCall(time_s, self.prompt_tokens, self.output_tokens, blocks, chat)
                    chat += 1

"""Questions about long documents, as LMCache's benchmark asks them: every document once or more, in
an order that is given. Nothing is drawn but the order, so hit rates follow by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvwarehouse.workloads.call import Call, Ids, blocks_in
from kvwarehouse.workloads.draws import Draws

ORDERS = ("tile", "interleave", "random")


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

    def calls(self) -> Iterator[Call]:
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
            yield Call(chat / self.requests_per_s, total, self.output_tokens, blocks, chat)

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

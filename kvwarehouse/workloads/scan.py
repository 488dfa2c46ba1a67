"""A flood of prompts that share nothing: what must not push out of a cache what others use.

Its hit rate is 0, in a cache of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvwarehouse.workloads.call import Call, Ids, blocks_in
from kvwarehouse.workloads.draws import Draws


@dataclass(frozen=True)
class Scan:
    """Without end, Poisson; all prompts of one length."""

    seed: int
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    block_tokens: int = 512

    def calls(self) -> Iterator[Call]:
        draws, ids, time_s, chat = Draws(self.seed, "scan"), Ids(), 0.0, 0
        while True:
            time_s += draws.wait(1 / self.requests_per_s)
            blocks = ids.take(blocks_in(self.prompt_tokens, self.block_tokens))
            yield Call(time_s, self.prompt_tokens, self.output_tokens, blocks, chat)
            chat += 1

"""One time to first token, and how much of its prompt came the way that was asked for, by vLLM's
own count of where the tokens came from. Stateless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS
from kvwarehouse_bench.vllm.messages import DEVICE, DISK, HOST, MISSED_BLOCKS, Answer


@dataclass(frozen=True)
class Sample:
    seconds: float
    """To the first token."""
    share: float
    """Of the whole blocks before the last token: how much came the way that was asked for. Of a
    prompt that was to be computed: how much was."""


def computed(tokens: Sequence[int], answer: Answer) -> Sample:
    """Of a prompt that was to be computed."""
    cached = sum(answer.counts.get(source, 0.0) for source in (DEVICE, HOST, DISK))
    return Sample(answer.seconds, 1.0 - cached / len(tokens))


def reused(tokens: Sequence[int], answer: Answer, source: str) -> Sample:
    """Of one that was to come from `source`, a counter of messages.py."""
    whole = (len(tokens) - 1) // BLOCK_TOKENS
    blocks = answer.counts.get(source, 0.0) / BLOCK_TOKENS
    came = blocks - answer.counts.get(MISSED_BLOCKS, 0.0)
    return Sample(answer.seconds, max(0.0, min(1.0, came / whole)))

"""Times to first token by way and prompt length, how much of each prompt came the way that was
asked for, by vLLM's own count of where the tokens came from, and what follows from them. Not
thread-safe.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvwarehouse_bench.harness.alternation import Spread, middle_half, ratios
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS, ModelShape
from kvwarehouse_bench.vllm.messages import DEVICE, DISK, HOST, MISSED_BLOCKS, EngineReply


@dataclass(frozen=True)
class TtftSample:
    seconds: float
    """To the first token."""
    share: float
    """Of the whole blocks before the last token: how much came the way that was asked for. Of a
    prompt that was to be computed: how much was."""


def computed(tokens: Sequence[int], answer: EngineReply) -> TtftSample:
    """Of a prompt that was to be computed."""
    cached = sum(answer.counts.get(source, 0.0) for source in (DEVICE, HOST, DISK))
    return TtftSample(answer.seconds, 1.0 - cached / len(tokens))


def reused(tokens: Sequence[int], answer: EngineReply, source: str) -> TtftSample:
    """Of one that was to come from `source`, a counter of messages.py."""
    whole = (len(tokens) - 1) // BLOCK_TOKENS
    blocks = answer.counts.get(source, 0.0) / BLOCK_TOKENS
    came = blocks - answer.counts.get(MISSED_BLOCKS, 0.0)
    return TtftSample(answer.seconds, max(0.0, min(1.0, came / whole)))


@dataclass
class TtftResults:
    """samples: by way and prompt length, one a round."""

    shape: ModelShape
    lengths: Sequence[int]
    conditions: dict[str, str]
    copy_bytes_per_s: float
    tail_tokens: int = 0
    """Of each prompt, beyond its length."""
    samples: dict[str, dict[int, list[TtftSample]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, way: str, tokens: int, sample: TtftSample) -> None:
        self.samples[way][tokens].append(sample)

    def seconds(self, way: str, tokens: int) -> list[float]:
        return [sample.seconds for sample in self.samples[way][tokens]]

    def spread(self, way: str, tokens: int) -> Spread:
        return middle_half(self.seconds(way, tokens))

    def ratio(self, over: str, under: str, tokens: int) -> Spread:
        return ratios(self.seconds(over, tokens), self.seconds(under, tokens))

    def beyond(self, way: str, least: str, tokens: int) -> Spread:
        """Seconds more than `least` took in the same round."""
        pairs = zip(self.seconds(way, tokens), self.seconds(least, tokens), strict=True)
        return middle_half([taken - base for taken, base in pairs])

    def share(self, way: str, tokens: int) -> float:
        return statistics.fmean(sample.share for sample in self.samples[way][tokens])

    def copy_s(self, tokens: int) -> float:
        """Of a plain copy of the KV that a load of such a prompt moves."""
        whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        return whole * self.shape.kv_bytes_per_token / self.copy_bytes_per_s

    def cell(self, way: str, tokens: int) -> str:
        """Milliseconds, with the middle half; a share where not all came that way."""
        spread = self.spread(way, tokens)
        low, high = spread.low * 1e3, spread.high * 1e3
        share = self.share(way, tokens)
        partly = "" if share > 0.999 else f" {share:.0%}"
        return f"{spread.median * 1e3:,.1f} ({low:,.0f} to {high:,.0f}){partly}"

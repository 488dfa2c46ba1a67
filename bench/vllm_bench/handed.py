"""A prompt's ways to a decode engine: computed there, or computed by a prefill engine and handed
over. Each is timed, and checked by vLLM's own count of where tokens came from. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench_frame.process import ProgramError
from vllm_bench.checkpoint import BLOCK_TOKENS
from vllm_bench.engine import Engine
from vllm_bench.messages import DEVICE, DISK, HOST, MISSED_BLOCKS, Answer, Ask
from vllm_bench.options import ALONE
from vllm_bench.sides import Sample
from vllm_bench.warehouse import Warehouse

ALONE_WAY = "alone"
HANDED = "handed over"
STORED = "stored"
BOTH = "both"
PREFILL = "prefill"


class Handed:
    """prefill: a kv_producer; decode: a kv_consumer; both on the warehouse. settle_s: after that
    what was given to be stored is there, and idle engines sleep."""

    def __init__(
        self, prefill: Engine, decode: Engine, warehouse: Warehouse, settle_s: float
    ) -> None:
        self._prefill, self._decode = prefill, decode
        self._warehouse = warehouse
        self._settle_s = settle_s

    def round(self, tokens: Sequence[int], *, alone_first: bool = True) -> dict[str, Sample]:
        """One sample of each way, of a prompt that nobody has seen."""
        self._warehouse.clear()
        samples = self._alone(tokens) if alone_first else {}
        samples |= self._handed(tokens)
        return samples if alone_first else samples | self._alone(tokens)

    def _alone(self, tokens: Sequence[int]) -> dict[str, Sample]:
        self._decode.forget()
        answer = self._decode.ask([Ask(tokens, params=ALONE)])
        cached = sum(answer.counts.get(source, 0.0) for source in (DEVICE, HOST, DISK))
        time.sleep(self._settle_s)
        return {ALONE_WAY: Sample(answer.seconds, 1.0 - cached / len(tokens))}

    def _handed(self, tokens: Sequence[int]) -> dict[str, Sample]:
        self._prefill.forget()
        self._decode.forget()
        before = self._prefill.ask([Ask(tokens)])
        if not before.params:
            raise ProgramError("the prefill engine said nothing of what it stored")
        handed = self._from_warehouse(tokens, self._decode.ask([Ask(tokens, params=before.params)]))
        time.sleep(self._settle_s)
        self._decode.forget()
        stored = self._from_warehouse(tokens, self._decode.ask([Ask(tokens)]))
        time.sleep(self._settle_s)
        return {
            PREFILL: Sample(before.seconds, 1.0),
            HANDED: handed,
            STORED: stored,
            BOTH: Sample(before.seconds + handed.seconds, handed.share),
        }

    def _from_warehouse(self, tokens: Sequence[int], answer: Answer) -> Sample:
        blocks = answer.counts.get(HOST, 0.0) / BLOCK_TOKENS
        came = blocks - answer.counts.get(MISSED_BLOCKS, 0.0)
        whole = (len(tokens) - 1) // BLOCK_TOKENS
        return Sample(answer.seconds, max(0.0, min(1.0, came / whole)))

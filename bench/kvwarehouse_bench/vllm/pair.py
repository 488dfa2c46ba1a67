"""A prefill and a decode engine on one warehouse, driven as a proxy drives them: the first answers
with a record, which goes with the same prompt to the second. Each way of a prompt's KV to the
decode engine is timed, and checked by vLLM's own count of where tokens came from.

Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvwarehouse_bench.harness.alternation import rotated
from kvwarehouse_bench.harness.process import ProgramError
from kvwarehouse_bench.vllm.engine import ALONE, VllmEngine
from kvwarehouse_bench.vllm.messages import DEVICE, HANDOFFS, HOST, Ask, EngineReply
from kvwarehouse_bench.vllm.results import TtftSample, computed, reused
from kvwarehouse_bench.vllm.warehouse import EngineWarehouse

NO_HANDOFF = "no hand-off"
HANDOFF = "hand-off"
STORED = "stored before"
PREFIX_CACHE = "prefix cache"
PREFILL = "prefill engine"
END_TO_END = "end to end"
WAYS = (NO_HANDOFF, HANDOFF, STORED, PREFIX_CACHE, PREFILL, END_TO_END)


class EnginePair:
    """prefill: a kv_producer; decode: a kv_consumer. settle: returns when what was given to be
    stored is there and idle engines sleep."""

    def __init__(
        self,
        prefill: VllmEngine,
        decode: VllmEngine,
        warehouse: EngineWarehouse,
        settle: Callable[[], None],
    ) -> None:
        self._prefill, self._decode = prefill, decode
        self._warehouse = warehouse
        self._settle = settle
        self.outcomes: Counter[str] = Counter()
        """Of the hand-offs: how the decode engine's connector counted its records, and its waits
        for pages."""

    def round(self, tokens: Sequence[int], turn: int = 0) -> dict[str, TtftSample]:
        """One sample of each way, of a prompt that nobody has asked before; which is first changes
        with the turn."""
        samples: dict[str, TtftSample] = {}
        for sampled in rotated([self._without, self._with], turn):
            samples |= sampled(tokens)
        return samples

    def _without(self, tokens: Sequence[int]) -> dict[str, TtftSample]:
        self._decode.forget()
        self._settle()
        return {NO_HANDOFF: computed(tokens, self._decode.ask([Ask(tokens, params=ALONE)]))}

    def _with(self, tokens: Sequence[int]) -> dict[str, TtftSample]:
        self._warehouse.clear()
        self._prefill.forget()
        self._decode.forget()
        self._settle()
        first = self._prefill.ask([Ask(tokens)])
        second = self._decode.ask([Ask(tokens, params=_record_of(first))])
        self._count(second)
        prefill, handed = computed(tokens, first), reused(tokens, second, HOST)
        self._decode.forget()
        self._settle()
        stored = reused(tokens, self._decode.ask([Ask(tokens)]), HOST)
        self._settle()
        cached = reused(tokens, self._decode.ask([Ask(tokens, params=ALONE)]), DEVICE)
        return {
            HANDOFF: handed,
            STORED: stored,
            PREFIX_CACHE: cached,
            PREFILL: prefill,
            END_TO_END: TtftSample(prefill.seconds + handed.seconds, handed.share),
        }

    def _count(self, answer: EngineReply) -> None:
        for name, value in answer.counts.items():
            if name.startswith(HANDOFFS):
                self.outcomes[name.removeprefix(HANDOFFS).removesuffix("_total")] += int(value)


def _record_of(answer: EngineReply) -> dict[str, object]:
    if not answer.params:
        raise ProgramError(
            "the prefill engine's answer has no hand-off record: it has no daemon, or the prompt"
            " fills no block"
        )
    return dict(answer.params)

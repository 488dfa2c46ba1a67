"""When everything that was asked of an engine is stored."""

from __future__ import annotations

import random

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.messages import Ask
from vllm_rig.pair import BLOCK, Pair, prompt


def settle(pair: Pair, rng: random.Random, block: int = BLOCK) -> None:
    """Waits until what was asked so far is stored, on all ranks and in all groups: an engine's
    stores keep their order, and those of one more prompt are seen. Empties vLLM's own cache."""
    last = Ask(prompt(rng, block + 1), max_tokens=1)
    pair.engine.ask(last)
    eventually(lambda: pair.reloaded(last).cached == block, "the engine's last store")
    pair.engine.forget()

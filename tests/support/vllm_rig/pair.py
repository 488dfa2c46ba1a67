"""An engine and the warehouse beside it: what most tests do with the two. One owner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.checkpoints import VOCABULARY
from vllm_rig.daemon import Daemon
from vllm_rig.engine import Engine
from vllm_rig.messages import Answer, Ask
from vllm_rig.stored_pages import StoredPages

ALONE = {"kvwarehouse.load": False, "kvwarehouse.store": False}
"""kv_transfer_params of a request that has nothing to do with the warehouse."""
BLOCK = 32
_FIRST_WORD = 3
_CANARY_TOKENS = BLOCK + 8


def prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids that no other test has."""
    return [rng.randrange(_FIRST_WORD, VOCABULARY) for _ in range(tokens)]


def blocks(ask: Ask) -> int:
    """Whole blocks once it is done; the last token that was sampled is in no block."""
    return (len(ask.tokens) + ask.max_tokens - 1) // BLOCK


def hit(ask: Ask) -> int:
    """Tokens that a full hit gives, in full attention: whole blocks. The last token of a prompt is
    computed again where it ends one, and vLLM counts it as cached all the same."""
    return len(ask.tokens) // BLOCK * BLOCK


class Pair:
    def __init__(self, engine: Engine, daemon: Daemon, stored_pages: StoredPages) -> None:
        self.engine, self.daemon, self.stored_pages = engine, daemon, stored_pages

    def stored(self, *asks: Ask, new: int | None = None) -> list[Answer]:
        """Answers, once the asks' blocks are stored. new: how many were not before; else all."""
        before = self.stored_pages.keys()
        answers = self.engine.generate(asks)
        self.stored_pages.wait_new(before, sum(map(blocks, asks)) if new is None else new)
        return answers

    def reloaded(self, ask: Ask) -> Answer:
        """Without vLLM's own cache: what is not computed comes from the warehouse."""
        self.engine.forget()
        return self.engine.ask(ask)

    def recomputed(self, ask: Ask) -> Answer:
        """Without the warehouse and without vLLM's own cache."""
        self.engine.forget()
        answer = self.engine.ask(replace(ask, kv=ALONE))
        assert answer.cached == 0
        self.engine.forget()
        return answer

    def all_recomputed(self, asks: Sequence[Ask]) -> list[Answer]:
        return [self.recomputed(ask) for ask in asks]

    def counted(self, name: str) -> float:
        """One of the connector's counters, as vLLM's metrics have it; a step or two late."""
        return self.engine.metrics().get(f"kvwarehouse_connector_{name}_total", 0)

    def connected(self, rng: random.Random) -> None:
        """Waits until the engine stores at the daemon that runs now, and loads from it: it finds
        one behind its own back."""

        def hits() -> bool:
            ask = Ask(prompt(rng, _CANARY_TOKENS), max_tokens=1)
            self.engine.ask(ask)
            return self.reloaded(ask).cached == BLOCK

        eventually(hits, "an engine that loads from the daemon")

    def idle(self) -> None:
        """Waits until the engine has neither blocks in use nor pins: nothing of a request is
        left behind."""
        self.engine.forget()
        eventually(
            lambda: self.stored_pages.client.status()["core"]["pins"]["held"] == 0,
            "a warehouse without pins",
        )

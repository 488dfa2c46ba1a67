"""An engine whose own offloading has the warehouse beneath it, and the daemon: what tests of the
tier do with the two. One owner."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.bay import Bay
from vllm_rig.daemon import Daemon
from vllm_rig.engine import Engine
from vllm_rig.messages import Answer, Ask
from vllm_rig.options import engine_options, tiering_config
from vllm_rig.pair import BLOCK, prompt
from vllm_rig.stored_pages import StoredPages

ROWS_BYTES = 6 << 20
"""Of vLLM's CPU tier: less than what `forget` puts there."""
SOON_S = 90.0


class Tiering:
    """options: vLLM's, and blocks_per_chunk."""

    def __init__(
        self,
        bay: Bay,
        daemon: Daemon,
        pages: StoredPages,
        checkpoint: Path,
        **options: Any,
    ) -> None:
        self._bay, self.daemon, self.pages = bay, daemon, pages
        chunk_blocks = options.pop("blocks_per_chunk", 1)
        transfer = tiering_config(daemon.address, ROWS_BYTES)
        transfer["kv_connector_extra_config"]["blocks_per_chunk"] = chunk_blocks
        self._options = engine_options(checkpoint, kv_transfer_config=transfer, **options)

    @property
    def engine(self) -> Engine:
        """The running one, or the next."""
        engine: Engine = self._bay.get(Engine, self._options)
        return engine

    def forget(self, rng: random.Random) -> None:
        """Afterwards neither vLLM's cache nor its CPU tier has anything of earlier prompts."""
        for _ in range(2):
            self.engine.ask(Ask(prompt(rng, 1100), max_tokens=1), SOON_S)
        self.engine.forget()

    def stored(self, ask: Ask, chunks: int) -> Answer:
        before = self.pages.keys()
        answer = self.engine.ask(ask, SOON_S)
        self.pages.wait_new(before, chunks)
        return answer

    def reloaded(self, ask: Ask, rng: random.Random) -> Answer:
        self.forget(rng)
        return self.engine.ask(ask, SOON_S)

    def recomputed(self, ask: Ask) -> Answer:
        """Under keys that nobody has."""
        self.engine.forget()
        answer = self.engine.ask(replace(ask, salt=os.urandom(8).hex()), SOON_S)
        assert answer.cached == 0
        self.engine.forget()
        return answer

    def connected(self, rng: random.Random) -> None:
        """Waits until the engine stores at the daemon that runs now."""

        def stores() -> bool:
            before = self.pages.keys()
            self.engine.ask(Ask(prompt(rng, 2 * BLOCK), max_tokens=1), SOON_S)
            return len(self.pages.keys() - before) > 0

        eventually(stores, "an engine that stores at the daemon")

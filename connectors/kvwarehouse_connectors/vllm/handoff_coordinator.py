"""Hands prompts over between engines: makes the records of prompts that this engine stored, and
decides whether a request that came with a record should wait for the other engine. Blocks nobody: a
request that waits is asked about again in a later step.

Runs in the scheduler's thread alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.vllm.handoff import (
    Handoff,
    HandoffOutcome,
    Record,
    boot_s,
    decode,
    digest,
    encode,
)
from kvwarehouse_connectors.vllm.tracked import VllmRequest

# A request that waits for another engine's pages is looked up this often.
_ASK_AGAIN_S = 0.005


class HandoffCoordinator:
    """spaces: one for each group, in their order. wait_s: how long a request waits at most. count:
    adds to a counter of stats.py."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        spaces: Sequence[kvw.Namespace],
        connection: DaemonConnection,
        wait_s: float,
        count: Callable[[str], None],
    ) -> None:
        self._groups = groups
        self._align = math.lcm(*(group.block_tokens for group in groups))
        self._namespaces = digest(space.id for space in spaces)
        self._connection = connection
        self._wait_s = wait_s
        self._count = count

    def record(self, tracked: VllmRequest, stored_tokens: int) -> dict[str, Any] | None:
        """For the answer of a request of which the first stored_tokens were given to be stored;
        None where nobody could find them."""
        tokens = min(stored_tokens, int(tracked.request.num_prompt_tokens))
        tokens -= tokens % self._align
        control = self._connection.control()
        if not tokens or control is None:
            return None
        prompt = self._prompt(tracked, tokens)
        return encode(Record(control.warehouse_id, self._namespaces, prompt, tokens, boot_s()))

    def received(self, params: Mapping[str, Any] | None) -> Handoff | None:
        """What a new request came with. What is no record is counted, and that is all."""
        record = decode(params)
        if isinstance(record, HandoffOutcome):
            self._count(f"handoff_{record.value}")
            return None
        return Handoff(record, self._wait_s) if record is not None else None

    def should_wait(self, tracked: VllmRequest, available_tokens: int, limit_tokens: int) -> bool:
        """Returns True while the request should wait for another engine that is still storing this
        prompt beyond `available_tokens`. After the first False it always returns False.
        limit_tokens: more are of no use. Never blocks."""
        handoff = tracked.handoff
        if handoff is None:
            return False
        began = handoff.waits
        outcome = self._judge(tracked, handoff, available_tokens, limit_tokens)
        if outcome is not None:
            tracked.handoff = None
            self._count(f"handoff_{outcome.value}")
            return False
        if not began:
            self._count("handoff_waits")
        tracked.ask_again_s = boot_s() + _ASK_AGAIN_S
        return True

    def give_up(self, tracked: VllmRequest) -> None:
        """There is no daemon that could have what a request waits for."""
        if tracked.handoff is not None:
            tracked.handoff = None
            self._count(f"handoff_{HandoffOutcome.EXPIRED.value}")

    def _judge(
        self, tracked: VllmRequest, handoff: Handoff, available_tokens: int, limit_tokens: int
    ) -> HandoffOutcome | None:
        control = self._connection.control()
        record = handoff.record
        if not handoff.waits and control is not None:
            prompt = self._prompt(tracked, record.tokens)
            refusal = handoff.refusal(control.warehouse_id, self._namespaces, prompt)
            if refusal is not None:
                return refusal
        useful = min(record.tokens, limit_tokens)
        useful -= useful % self._align
        return handoff.judge(
            boot_s(), complete=available_tokens >= useful, alive=control is not None
        )

    def _prompt(self, tracked: VllmRequest, tokens: int) -> str:
        """What a record calls a request's first tokens; "" where it has not as many, or they end
        inside a block."""
        keys = []
        for group in self._groups:
            end, rest = divmod(tokens, group.block_tokens)
            if rest or not 0 < end <= tracked.keys.count(group.block_hashes):
                return ""
            keys.append(tracked.keys.keys(end - 1, end, group.block_hashes)[0])
        return digest(keys)

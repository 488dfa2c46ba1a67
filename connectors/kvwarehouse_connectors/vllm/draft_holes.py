"""Where a draft's KV has holes, so that nothing of it is stored.

vLLM leaves out the draft of a whole step when one request of it comes near the longest length that
the draft can take (`GPUModelRunner._input_fits_in_drafter`). The target's KV is computed, the
draft's is not, and vLLM's own cache shares such blocks with later requests. Outputs do not suffer,
as the target decides; what the draft gets right does.

Runs in the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvwarehouse_connectors.vllm.tracked import VllmRequest

_MOST_KNOWN = 1 << 16


class DraftHoles:
    """limit_tokens: from this length on of any request, a step may have no draft. hash_tokens: of
    one of vLLM's block hashes."""

    def __init__(self, limit_tokens: int, hash_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._hash_tokens = hash_tokens
        self._known: set[bytes] = set()  # hashes of the first block with a hole, of each request
        self._coming: dict[str, int] = {}  # requests of which that block has no hash yet
        self._overflow = False

    def look(self, step: Any, requests: Mapping[str, VllmRequest]) -> None:
        """With each step, before its stores are planned: requests with holes store nothing more."""
        for request_id in list(self._coming):
            self._remember(requests[request_id].request)
        scheduled = [
            (tracked, tokens)
            for request_id, tokens in step.num_scheduled_tokens.items()
            if (tracked := requests.get(request_id)) is not None
        ]
        if all(
            tracked.request.num_computed_tokens + tokens < self._limit_tokens
            for tracked, tokens in scheduled
        ):
            return
        for tracked, _ in scheduled:
            request_id = tracked.request.request_id
            tracked.stores = False
            begin = tracked.request.num_computed_tokens // self._hash_tokens
            self._coming[request_id] = min(begin, self._coming.get(request_id, begin))
            self._remember(tracked.request)

    def ended(self, request: Any) -> None:
        """A request ended; what is in no whole block by now nobody can find."""
        self._remember(request)
        self._coming.pop(request.request_id, None)

    def found_in(self, hashes: Sequence[bytes]) -> bool:
        """Whether blocks of vLLM's own cache, a prefix by its hashes, may have holes."""
        return self._overflow or (bool(self._known) and not self._known.isdisjoint(hashes))

    def clear(self) -> None:
        """vLLM's own cache was reset, and requests that run now began before."""
        self._known.clear()
        self._overflow = False

    def _remember(self, request: Any) -> None:
        hashes = request.block_hashes
        begin = self._coming.get(request.request_id, len(hashes))
        if begin < len(hashes):
            del self._coming[request.request_id]
            self._overflow |= len(self._known) >= _MOST_KNOWN
            if not self._overflow:
                self._known.add(hashes[begin])

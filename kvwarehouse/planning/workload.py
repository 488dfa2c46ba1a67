"""What a service asks of its engine: lengths, rates, reuse. An immutable value; thread-safe."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvwarehouse.errors import UsageError

LONGEST_PROMPT = 100_000_000


@dataclass(frozen=True)
class Workload:
    """Means over requests. `reuse` is the part of a prompt that is stored already, 0 to 1: at least
    one token is always computed, for its logits. `steady`: the rate hardly changes over the day."""

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    reuse: float
    steady: bool = False

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if not 1 <= value <= LONGEST_PROMPT:
                raise UsageError(
                    f"{name} of {value} tokens cannot be; use 1 to {LONGEST_PROMPT:,}",
                    code="bad_workload",
                )
        if not (self.requests_per_s > 0 and math.isfinite(self.requests_per_s)):
            raise UsageError(
                f"{self.requests_per_s:g} requests a second is no load; use a positive rate",
                code="bad_workload",
            )
        if not 0 <= self.reuse <= 1:
            raise UsageError(
                f"a reuse of {self.reuse:g} cannot be; use 0 to 1 (0.6 for 60 %)",
                code="bad_workload",
            )

    @property
    def hit_tokens(self) -> int:
        return min(int(self.prompt_tokens * self.reuse), self.prompt_tokens - 1)

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens

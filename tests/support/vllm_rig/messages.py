"""What tests ask an engine for, and what it answers: plain values, JSON between the processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ask:
    """One prompt. Greedy, and to the last of max_tokens, unless told otherwise."""

    tokens: list[int]
    max_tokens: int = 8
    salt: str | None = None
    kv: dict[str, Any] = field(default_factory=dict)
    """kv_transfer_params."""
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int = 5
    prompt_logprobs: int | None = None
    lora: tuple[str, str] | None = None
    """Name and folder of an adapter."""
    gives_up: bool = False
    """Its client aborts it at its first token. From the process that hears the tokens: a test that
    is told of the first, and then aborts, may be a thousand tokens late on a busy machine."""
    resets: bool = False
    """The connector is reset at its first token, and the request is refused if vLLM could reset its
    own cache then: no block was in use. From that process, too."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    candidates: list[dict[int, float]]
    """For each token the log-probabilities of the likeliest, and of itself."""
    cached: int
    """Tokens of the prompt that were not computed, by vLLM's own count."""
    finish: str
    """"length", "stop", "abort", "error"."""
    kv: dict[str, Any] | None = None

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Answer:
        """JSON makes text of the tokens that are keys."""
        candidates = [
            {int(token): value for token, value in step.items()} for step in plain["candidates"]
        ]
        return cls(**{**plain, "candidates": candidates})

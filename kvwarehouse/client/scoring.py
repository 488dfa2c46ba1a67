"""A KV-aware choice among warehouses: a reference for routers, that can be followed by hand.

What a router knows and a daemon cannot (how busy each engine is) is the caller's to say.
Stateless; thread-safe.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvwarehouse.client.routing import Answer, Question
from kvwarehouse.errors import UsageError


@dataclass(frozen=True)
class Costs:
    """What loading a token costs, in tokens computed: 0 is nothing, 1 as much as computing it. And
    what a request that an engine has already costs the next one there, in tokens too."""

    dram: float = 0.1
    """A guess, as are the others; `kvwarehouse plan` says what it is for a model and a machine."""
    nvme: float = 0.4
    """A disk is slower than memory, and shared by all who read from it."""
    request_tokens: float = 512.0
    """Of each request under way that the router says a warehouse's engines have."""

    def __post_init__(self) -> None:
        for name in ("dram", "nvme"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise UsageError(
                    f"the cost of a token in {name} is {value!r}; use 0 (free) to 1 (as computing)",
                    code="bad_cost",
                )
        if not (math.isfinite(self.request_tokens) and self.request_tokens >= 0):
            raise UsageError(
                f"the cost of a request is {self.request_tokens!r} tokens; use 0 or more",
                code="bad_cost",
            )


@dataclass(frozen=True)
class Candidate:
    """A warehouse that answered, with its score in tokens of prefill saved; higher is better."""

    answer: Answer
    score: float
    requests: float
    """Under way there, as the router said."""
    saved_tokens: float
    """What the prefix saves: its tokens less what having them costs."""
    tie: bytes = field(repr=False)


@dataclass(frozen=True)
class Ranking:
    """What choose() makes of the answers."""

    candidates: tuple[Candidate, ...]
    """Best first."""
    left_out: tuple[Answer, ...]
    """Those that did not answer within the bound, refused, or take no more requests."""

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


def choose(
    answers: Sequence[Answer],
    question: Question,
    *,
    costs: Costs | None = None,
    requests: Mapping[str, float] | None = None,
) -> Ranking:
    """Scores `answers`: tokens that a warehouse has, each less what having it costs in its tier,
    less the cost of the requests that are under way there. `requests`: by address; not named: 0.

    Ties go to fewer requests, then to where more is in DRAM, then to the one whose id hashes
    highest with the prompt's beginning: prompts that begin alike meet again in one place, and
    different ones spread (rendezvous hashing). Raises UsageError for requests of an address that
    was not asked."""
    costs = costs or Costs()
    requests = requests or {}
    unknown = sorted(set(requests) - {answer.address for answer in answers})
    if unknown:
        raise UsageError(
            f"requests are given for {unknown[0]!r}, which is none of the addresses",
            code="bad_address",
        )
    beginning = question.beginning()
    candidates, left_out = [], []
    for answer in answers:
        if answer.problem or answer.draining:
            left_out.append(answer)
            continue
        held = answer.holding
        saved = 0.0
        if held is not None:
            saved = held.dram_tokens * (1 - costs.dram) + held.nvme_tokens * (1 - costs.nvme)
        waiting = requests.get(answer.address, 0.0)
        score = saved - waiting * costs.request_tokens
        tie = hashlib.blake2b(beginning, key=answer.warehouse_id[:64], digest_size=16).digest()
        candidates.append(Candidate(answer, score, waiting, saved, tie))
    candidates.sort(key=_rank, reverse=True)
    return Ranking(tuple(candidates), tuple(left_out))


def _rank(candidate: Candidate) -> tuple[float, float, int, bytes]:
    held = candidate.answer.holding
    return candidate.score, -candidate.requests, held.dram_pages if held else 0, candidate.tie

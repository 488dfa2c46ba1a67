"""The workloads by name: what each can be told, within which bounds, and how it is made.

The command line makes its flags of this; nothing else lists workloads. Stateless; thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvwarehouse.errors import UsageError
from kvwarehouse.workloads.agents import VARIANTS, Agents
from kvwarehouse.workloads.call import Workload
from kvwarehouse.workloads.conversations import PROFILES, TO_BUSINESS, Chat, SystemPrompts
from kvwarehouse.workloads.synthetic import ORDERS, DocumentQa, Scan, TierSweep

_MOST_TOKENS = 10_000_000
_MOST_COUNT = 100_000_000


@dataclass(frozen=True)
class Setting:
    """A whole number of `least` to `most`, one of `choices`, or a list of factors."""

    default: Any
    help: str
    least: int = 1
    most: int = _MOST_TOKENS
    choices: Sequence[str] = ()
    factors: bool = False

    def read(self, flag: str, text: str) -> Any:
        """The value that a person wrote. Raises UsageError."""
        if self.choices:
            if text not in self.choices:
                raise _bad(flag, text, f"use one of {', '.join(self.choices)}")
            return text
        if self.factors:
            return _factors(flag, text)
        if not text.isdecimal() or not self.least <= int(text) <= self.most:
            raise _bad(flag, text, f"use a whole number from {self.least:,} to {self.most:,}")
        return int(text)


@dataclass(frozen=True)
class WorkloadKind:
    """`endless`: it goes on until it is told to stop. `formats`: the first is the default."""

    summary: str
    requests_per_s: float
    endless: bool
    formats: Sequence[str]
    settings: Mapping[str, Setting]
    make: Callable[[int, float, Mapping[str, Any]], Workload]


_OUTPUT = Setting(100, "of each answer.")
_BY_LINE = ("mooncake", "bailian")

KINDS: Final[Mapping[str, WorkloadKind]] = {
    "chat": WorkloadKind(
        "conversations over a shared root (Mooncake)",
        3.9,
        True,
        _BY_LINE,
        {
            "profile": Setting(
                "conversation", "like which published trace:", choices=tuple(PROFILES)
            )
        },
        lambda seed, rate, of: Chat(seed, PROFILES[of["profile"]], rate),
    ),
    "document-qa": WorkloadKind(
        "questions about long documents (LMCache's benchmark, exactly)",
        1.0,
        False,
        _BY_LINE,
        {
            "documents": Setting(8, "how many.", most=_MOST_COUNT),
            "document_tokens": Setting(10_000, "of each document."),
            "question_tokens": Setting(0, "of each question, behind the document.", least=0),
            "queries": Setting(2, "questions about each document.", most=_MOST_COUNT),
            "order": Setting("tile", "asked in which order:", choices=ORDERS),
            "output_tokens": _OUTPUT,
        },
        lambda seed, rate, of: DocumentQa(seed=seed, requests_per_s=rate, **of),
    ),
    "agents": WorkloadKind(
        "agentic sessions with sub-agents (AgentX)",
        1.0,
        True,
        ("weka", *_BY_LINE),
        {
            "variant": Setting(
                "cached",
                "of which about 96 % can be hit, or about 70 %:",
                choices=tuple(VARIANTS),
            )
        },
        lambda seed, rate, of: Agents(seed, VARIANTS[of["variant"]], rate),
    ),
    "system-prompts": WorkloadKind(
        "calls of programs that share system prompts (Bailian, to business)",
        20.0,
        True,
        ("bailian", "mooncake"),
        {},
        lambda seed, rate, _: SystemPrompts(seed, TO_BUSINESS, rate),
    ),
    "scan": WorkloadKind(
        "a flood of prompts that share nothing",
        10.0,
        True,
        _BY_LINE,
        {"prompt_tokens": Setting(8_192, "of each prompt."), "output_tokens": _OUTPUT},
        lambda seed, rate, of: Scan(seed=seed, requests_per_s=rate, **of),
    ),
    "tiers": WorkloadKind(
        "working sets around the size of a tier (prefix-suffix-tuner)",
        10.0,
        False,
        _BY_LINE,
        {
            "tier_blocks": Setting(
                1_000, "the tier's size, in blocks of 512 tokens.", most=_MOST_COUNT
            ),
            "sets": Setting(
                (1.05,), "sizes of the working sets, in tiers, such as 0.5,1,1.05,2.", factors=True
            ),
            "passes": Setting(2, "through each set.", most=_MOST_COUNT),
            "prefix_tokens": Setting(4_096, "of a prompt's own beginning."),
            "suffix_tokens": Setting(992, "of the text that all prompts end with.", least=0),
            "output_tokens": _OUTPUT,
        },
        lambda _, rate, of: TierSweep(requests_per_s=rate, **of),
    ),
}


def _factors(flag: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not 1 <= len(found) <= 100 or not all(0 < each <= 1_000 for each in found):
        raise _bad(flag, text, "use 1 to 100 factors above 0, up to 1,000, such as 0.5,1,1.05,2")
    return found


def _bad(flag: str, text: str, fix: str) -> UsageError:
    return UsageError(f"{flag} {text} cannot be; {fix}", code="bad_workload")

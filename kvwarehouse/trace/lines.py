"""Traces with a request on each line: Mooncake, Bailian, and our own recordings.

Stateless but for the clock of one file. Formats: Mooncake is the JSONL of kvcache-ai/Mooncake
(FAST'25), timestamps in milliseconds, blocks of 512 tokens; Bailian is that of Alibaba's
qwen-bailian-usagetraces-anon, timestamps in seconds, blocks of 16; in both an equal id means an
equal prefix. A recording starts with a line that says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvwarehouse.trace import fields as fields
from kvwarehouse.trace.fields import BadLineError
from kvwarehouse.trace.trace import Request

RECORDING: Final = "kvwarehouse_trace"
RECORDING_VERSION: Final = 1

BLOCK_TOKENS: Final[Mapping[str, int]] = {"mooncake": 512, "bailian": 16}


def mooncake(line: Mapping[str, Any], block_tokens: int) -> Request:
    ids = fields.blocks(line)
    return Request(
        fields.seconds(line, "timestamp", unit_s=1e-3),
        fields.tokens(line, "input_length", len(ids) * block_tokens),
        fields.tokens(line, "output_length", 0),
        ids,
    )


def bailian(line: Mapping[str, Any], block_tokens: int) -> Request:
    ids = fields.blocks(line)
    return Request(
        fields.seconds(line, "timestamp"),
        fields.tokens(line, "input_length", len(ids) * block_tokens),
        fields.tokens(line, "output_length", 0),
        ids,
    )


def recording(line: Mapping[str, Any], block_tokens: int) -> Request:
    names = fields.keys(line)
    return Request(
        fields.seconds(line, "t"),
        fields.tokens(line, "in", len(names) * block_tokens),
        fields.tokens(line, "out", 0),
        names,
    )


LINE_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], int], Request]]] = {
    "mooncake": mooncake,
    "bailian": bailian,
    "kvwarehouse": recording,
}


def recording_block_tokens(head: Mapping[str, Any]) -> int:
    """Of a recording's first line. Raises BadLineError for one of another version."""
    if head.get(RECORDING) != RECORDING_VERSION:
        raise BadLineError(
            f"a recording of version {head.get(RECORDING)!r}; this program reads"
            f" {RECORDING_VERSION}"
        )
    found = fields.tokens(head, "block_tokens", 0)
    if found < 1:
        raise BadLineError(f"block_tokens is {found}; it must be 1 or more")
    return found


class Clock:
    """Refuses a time before the one before it: a line out of place, or two traces in one file."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def check(self, time_s: float) -> None:
        if time_s < self._last_s:
            raise BadLineError(f"the clock goes backwards, from {self._last_s:g} s to {time_s:g} s")
        self._last_s = time_s

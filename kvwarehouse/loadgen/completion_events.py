"""A streamed completion as its server-sent events: tokens, usage, the end. Not thread-safe.

Sources: the event-stream format of the HTML standard, of which completion servers use data lines,
and the streaming form of OpenAI's completions API, as vLLM and SGLang serve it. A chunk with text,
or with no text and no reason to finish (half of a character), is a token; several tokens may come
in one chunk, and `usage` has their number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvwarehouse.loadgen.results import EngineAnswer

MOST_LINE_BYTES: Final = 4 * 1024 * 1024

_DONE = b"[DONE]"
# Reasons of an answer that is as it was asked for.
_GOOD = ("length", "stop")
_SPARE_EVENTS = 1_000


class MalformedError(ValueError):
    """Says what in the stream is none."""


def event_data(read: Callable[[], bytes]) -> Iterator[bytes]:
    """`read` returns what has arrived, b"" at the end. An event without its blank line at the end
    of the stream counts: some servers forget it behind their last."""
    data: list[bytes] = []
    for line in _lines(read):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data = []
    if data:
        yield b"\n".join(data)


def _lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    rest = b""
    while arrived := read():
        *whole, rest = (rest + arrived).split(b"\n")
        if len(rest) > MOST_LINE_BYTES:
            raise MalformedError(f"a line of more than {MOST_LINE_BYTES:,} bytes")
        yield from (line.removesuffix(b"\r") for line in whole)
    if rest:
        yield rest


class FailedError(Exception):
    """Why there is no answer: `reason` is counted by, `detail` is shown once."""

    def __init__(self, reason: str, detail: str = "", status: int = 0) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.status = status


def parsed(data: bytes) -> Any:
    """None for the last event. Raises MalformedError."""
    if data.strip() == _DONE:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"an event that is no JSON ({error}): {data[:80]!r}") from error


class Reading:
    def __init__(self, asked_tokens: int) -> None:
        self._asked = asked_tokens
        self._arrivals_s: list[float] = []
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}
        self.done = False

    def take(self, event: Any, at_s: float) -> None:
        """Raises FailedError where the engine says that it failed, MalformedError for what is no
        event of a completion."""
        if event is None:
            self.done = True
            return
        if not isinstance(event, dict):
            raise MalformedError(f"an event that is a {type(event).__name__}")
        if event.get("error"):
            raise FailedError("engine_error", json.dumps(event["error"]))
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(usage, dict):
            self._usage = usage
        elif not isinstance(choices, list):
            raise MalformedError(f"an event with neither choices nor usage: {str(event)[:80]}")
        for choice in choices or []:
            self._choice(choice, at_s)

    def answer(self, begin_s: float, end_s: float) -> EngineAnswer:
        """At the end of the stream. Raises FailedError where that was not the end of an answer."""
        if not self.done and self._finish is None:
            raise FailedError("cut_off", f"after {len(self._arrivals_s)} tokens")
        if self._finish not in (*_GOOD, None):
            raise FailedError(f"finish_{self._finish}", f"after {len(self._arrivals_s)} tokens")
        if not self._arrivals_s:
            raise FailedError("no_tokens", "the stream ended well, without any")
        details = self._usage.get("prompt_tokens_details")
        return EngineAnswer(
            begin_s,
            end_s,
            self._arrivals_s,
            self._asked,
            _count(self._usage, "completion_tokens"),
            _count(self._usage, "prompt_tokens"),
            _count(details, "cached_tokens"),
        )

    def _choice(self, choice: Any, at_s: float) -> None:
        if not isinstance(choice, dict):
            raise MalformedError(f"a choice that is a {type(choice).__name__}")
        finish = choice.get("finish_reason")
        if finish is not None:
            self._finish = str(finish)[:40]
        if choice.get("text") or finish is None:
            self._arrivals_s.append(at_s)
        if len(self._arrivals_s) > self._asked + _SPARE_EVENTS:
            raise FailedError("too_many_tokens", f"more than the {self._asked} that were asked for")


def _count(fields: Any, name: str) -> int | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if type(value) is int and value >= 0 else None

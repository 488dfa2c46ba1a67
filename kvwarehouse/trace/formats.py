"""The formats of public traces, and of our own recordings: JSON objects to Requests.

A request on each line: Mooncake is the JSONL of kvcache-ai/Mooncake (FAST'25), timestamps in
milliseconds, blocks of 512 tokens; Bailian is that of Alibaba's qwen-bailian-usagetraces-anon,
timestamps in seconds, blocks of 16; in both an equal id means an equal prefix. A recording starts
with a line that says what it is.

A session in each JSON object: the agent traces in WEKA's format. A session has its requests, in the
order of their `t` (seconds since it began), and sub-agents with requests of their own, nested to
any depth. Ids of scope "local" mean something within their session only.

Stateless but for the clock of one file. A complaint is a BadLineError: what is wrong with an
object, without its place. The reader of the file knows the place, and whether to go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvwarehouse.trace.trace import TraceRequest

_LARGEST = 2**53

RECORDING: Final = "kvwarehouse_trace"
RECORDING_VERSION: Final = 1

BLOCK_TOKENS: Final[Mapping[str, int]] = {"mooncake": 512, "bailian": 16}

_DEFAULT_BLOCK_TOKENS: Final = 64
MOST_NESTED: Final = 64
# Ends a list of requests; what is in one can be anything, null too.
_NO_MORE: Final = object()


class BadLineError(ValueError):
    """Says what is wrong, in words that stand behind "file:line: "."""


def decoded(text: bytes | str) -> Any:
    """JSON, without the infinities that Python lets in. Raises BadLineError."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise BadLineError("nested too deeply") from error
    except ValueError as error:
        raise BadLineError(f"not JSON ({error})") from error


def an_object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadLineError(f"a {type(value).__name__} where an object belongs")
    return value


def seconds_field(fields: Mapping[str, Any], name: str, *, unit_s: float = 1.0) -> float:
    """The time `name`, of units of `unit_s` seconds."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLineError(f"{name} is {_shown(value)}, not a number")
    if not 0 <= value < _LARGEST:
        raise BadLineError(f"{name} is {_shown(value)}; it must be 0 or more")
    return value * unit_s


def tokens_field(fields: Mapping[str, Any], name: str, default: int) -> int:
    """A length; `default` where there is none."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadLineError(f"{name} is {_shown(value)}, not a whole number")
    if not 0 <= value < _LARGEST:
        raise BadLineError(f"{name} is {_shown(value)}; it must be 0 to 2^53")
    return value


def blocks_field(fields: Mapping[str, Any], name: str = "hash_ids") -> list[int]:
    """The ids of a request's blocks, root first."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise BadLineError(f"{name} is {_shown(value)}, not a list of block ids")
    for each in value:
        if type(each) is not int or each < 0:
            raise BadLineError(f"{name} has {_shown(each)}; block ids are whole numbers from 0")
    return value


def keys_field(fields: Mapping[str, Any], name: str = "keys") -> list[str]:
    """The keyed hashes of a recording."""
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise BadLineError(f"{name} is {_shown(value)}, not a list of keys")
    return value


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def mooncake(line: Mapping[str, Any], block_tokens: int) -> TraceRequest:
    ids = blocks_field(line)
    return TraceRequest(
        seconds_field(line, "timestamp", unit_s=1e-3),
        tokens_field(line, "input_length", len(ids) * block_tokens),
        tokens_field(line, "output_length", 0),
        ids,
    )


def bailian(line: Mapping[str, Any], block_tokens: int) -> TraceRequest:
    ids = blocks_field(line)
    return TraceRequest(
        seconds_field(line, "timestamp"),
        tokens_field(line, "input_length", len(ids) * block_tokens),
        tokens_field(line, "output_length", 0),
        ids,
    )


def recording(line: Mapping[str, Any], block_tokens: int) -> TraceRequest:
    names = keys_field(line)
    return TraceRequest(
        seconds_field(line, "t"),
        tokens_field(line, "in", len(names) * block_tokens),
        tokens_field(line, "out", 0),
        names,
    )


LINE_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], int], TraceRequest]]] = {
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
    found = tokens_field(head, "block_tokens", 0)
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


def session_block_tokens(session: Mapping[str, Any]) -> int:
    found = tokens_field(session, "block_size", _DEFAULT_BLOCK_TOKENS)
    if found < 1:
        raise BadLineError(f"block_size is {found}; it must be 1 or more")
    return found


def session_requests(
    session: Mapping[str, Any], number: int, start_s: float
) -> Iterator[TraceRequest | BadLineError]:
    """All requests, those of sub-agents after the request that they follow. `number` tells its
    local ids from those of other sessions. What is wrong with a request comes out in its place;
    what is wrong with the session is raised."""
    scope = session.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise BadLineError(f"hash_id_scope is {scope!r}; it must be local or global")
    local = number if scope == "local" else None
    block_tokens = session_block_tokens(session)
    # Depth first without recursion: a list of requests, its clock, and where in it we are.
    stack = [(iter(_listed(session)), Clock())]
    while stack:
        requests, clock = stack[-1]
        value = next(requests, _NO_MORE)
        if value is _NO_MORE:
            stack.pop()
            continue
        try:
            line = an_object(value)
            if line.get("type") == "subagent":
                if len(stack) >= MOST_NESTED:
                    raise BadLineError(f"sub-agents nested more than {MOST_NESTED} deep")
                stack.append((iter(_listed(line)), Clock()))
                continue
            yield _request(line, block_tokens, local, start_s, clock)
        except BadLineError as bad:
            yield bad


def _listed(owner: Mapping[str, Any]) -> list[Any]:
    requests = owner.get("requests")
    if not isinstance(requests, list):
        raise BadLineError("has no list of requests")
    return requests


def _request(
    line: Mapping[str, Any], block_tokens: int, local: int | None, start_s: float, clock: Clock
) -> TraceRequest:
    ids = blocks_field(line)
    time_s = seconds_field(line, "t")
    clock.check(time_s)
    return TraceRequest(
        start_s + time_s,
        tokens_field(line, "in", len(ids) * block_tokens),
        tokens_field(line, "out", 0),
        ids if local is None else [(local, each) for each in ids],
    )

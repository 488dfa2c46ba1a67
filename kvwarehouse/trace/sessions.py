"""Traces with a session in each JSON object: the agent traces in WEKA's format.

A session has its requests, in the order of their `t` (seconds since it began), and sub-agents with
requests of their own, nested to any depth. Ids of scope "local" mean something within their session
only. Stateless; thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvwarehouse.trace import fields as fields
from kvwarehouse.trace.fields import BadLineError
from kvwarehouse.trace.lines import Clock
from kvwarehouse.trace.trace import Request

_DEFAULT_BLOCK_TOKENS: Final = 64
MOST_NESTED: Final = 64


def session_block_tokens(session: Mapping[str, Any]) -> int:
    found = fields.tokens(session, "block_size", _DEFAULT_BLOCK_TOKENS)
    if found < 1:
        raise BadLineError(f"block_size is {found}; it must be 1 or more")
    return found


def session_requests(
    session: Mapping[str, Any], number: int, start_s: float
) -> Iterator[Request | BadLineError]:
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
        value = next(requests, None)
        if value is None:
            stack.pop()
            continue
        try:
            line = fields.an_object(value)
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
) -> Request:
    ids = fields.blocks(line)
    time_s = fields.seconds(line, "t")
    clock.check(time_s)
    return Request(
        start_s + time_s,
        fields.tokens(line, "in", len(ids) * block_tokens),
        fields.tokens(line, "out", 0),
        ids if local is None else [(local, each) for each in ids],
    )

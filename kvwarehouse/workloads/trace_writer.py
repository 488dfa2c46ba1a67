"""Workloads as trace files, in the public formats that `kvwarehouse.trace` reads, and how much of a
workload a file has. One request (or session) is in memory at a time, so a trace of days is as
good as one of minutes. Stateless.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from kvwarehouse.errors import UsageError
from kvwarehouse.trace.formats import BLOCK_TOKENS
from kvwarehouse.workloads.agents import AgentCall, AgentSession, SubAgent
from kvwarehouse.workloads.call import WorkloadCall, of_blocks

STDOUT: Final = "-"
_MODEL = "made-up"


@dataclass(frozen=True)
class WorkloadBounds:
    """None: no bound."""

    requests: int | None = None
    duration_s: float | None = None


def bounded(calls: Iterable[WorkloadCall], bounds: WorkloadBounds) -> Iterator[WorkloadCall]:
    for number, call in enumerate(calls, start=1):
        if bounds.duration_s is not None and call.time_s > bounds.duration_s:
            return
        yield call
        if number == bounds.requests:
            return


def bounded_sessions(
    sessions: Iterable[AgentSession], bounds: WorkloadBounds
) -> Iterator[AgentSession]:
    """Whole ones, until they have the requests between them."""
    requests = 0
    for session in sessions:
        yield session
        requests += len(session.flat())
        if bounds.requests is not None and requests >= bounds.requests:
            return


Line = Callable[[WorkloadCall, int], dict[str, Any]]


def mooncake(call: WorkloadCall, block_tokens: int) -> dict[str, Any]:
    return {
        "timestamp": round(call.time_s * 1000),
        "input_length": call.input_tokens,
        "output_length": call.output_tokens,
        "hash_ids": of_blocks(call, block_tokens, BLOCK_TOKENS["mooncake"]),
    }


def bailian(call: WorkloadCall, block_tokens: int) -> dict[str, Any]:
    return {
        "chat_id": call.chat,
        "parent_chat_id": call.parent,
        "timestamp": round(call.time_s, 3),
        "input_length": call.input_tokens,
        "output_length": call.output_tokens,
        "type": "text",
        "turn": call.turn,
        "hash_ids": of_blocks(call, block_tokens, BLOCK_TOKENS["bailian"]),
    }


CALL_LINES: Final[dict[str, Line]] = {"mooncake": mooncake, "bailian": bailian}


def weka(session: AgentSession) -> dict[str, Any]:
    """Sub-agents stand behind the request that sent them."""
    requests: list[dict[str, Any]] = []
    for each in session.calls:
        requests.append(_weka_request(each))
        for number, sent in enumerate(each.sent):
            requests.append(_weka_subagent(sent, f"{len(requests)}-{number}"))
    return {
        "id": f"session-{session.number}",
        "models": [_MODEL],
        "block_size": session.block_tokens,
        "hash_id_scope": "local",
        "tool_tokens": session.tool_tokens,
        "system_tokens": session.system_tokens,
        "requests": requests,
    }


def _weka_request(each: AgentCall) -> dict[str, Any]:
    return {
        "t": each.call.time_s,
        "type": "n",
        "model": _MODEL,
        "in": each.call.input_tokens,
        "out": each.call.output_tokens,
        "hash_ids": list(each.call.blocks),
        "api_time": each.api_s,
        "think_time": each.think_s,
    }


def _weka_subagent(sent: SubAgent, agent: str) -> dict[str, Any]:
    return {
        "type": "subagent",
        "agent_id": agent,
        "subagent_type": sent.kind,
        "requests": [_weka_request(each) for each in sent.calls],
    }


def write_lines(path: str, lines: Iterable[dict[str, Any]]) -> int:
    """To a new file, or to the standard output for "-". Returns the lines written. A file that is
    not whole, because of an error or an interrupt, is removed: it would pass for a trace. Raises
    UsageError where it exists or cannot be written."""
    written = 0
    try:
        with _opened(path) as opened:
            for line in lines:
                opened.write(json.dumps(line, separators=(",", ":")) + "\n")
                written += 1
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"the trace {path} cannot be written: {error.strerror}; give the path of a new file"
            " with room on its disk, or - for the standard output",
            code="bad_trace_path",
        ) from error
    return written


@contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    if path == STDOUT:
        yield sys.stdout
        return
    with Path(path).open("x", encoding="ascii") as opened:
        try:
            yield opened
        except BaseException:
            Path(path).unlink()
            raise

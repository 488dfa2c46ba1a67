"""Keeps: prompts whose pages stay, asked for and listed. Stateless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvwarehouse.client.admin import Named, Opened, namespace_id
from kvwarehouse.client.prompt import Keys
from kvwarehouse.client.routing import Question
from kvwarehouse.client.rpc import Call
from kvwarehouse.errors import UsageError
from kvwarehouse.types import KeyRun
from kvwarehouse.wire import plain
from kvwarehouse.wire import warehouse_pb2 as pb


@dataclass(frozen=True)
class Keep:
    name: str
    """"": there is none, since nothing of the prompt is stored."""
    namespace_id: bytes
    model: str
    pages: int
    """Of the prompt, those that other keeps have as well among them."""
    bytes: int
    ttl_s: float
    left_s: float
    """Until it ends, as the daemon said."""
    renewed: bool


@dataclass(frozen=True)
class ListedKeeps:
    keeps: tuple[Keep, ...]
    """Those that end first, first."""
    bytes: int
    """That they hold, each page once."""
    capacity_bytes: int


def keep(
    space: Named | Opened,
    tokens: Any,
    keys: Keys | None,
    *,
    ttl_s: float,
    name: str,
    renewed: bool,
) -> Call[pb.KeepResponse, Keep]:
    """Raises UsageError for a prompt that is none."""
    alone = _alone(keys)
    own = cast("Sequence[bytes] | None", keys) if alone is None else alone
    asked = Question(tokens, own, "", namespace_id(space)).to_wire()
    request = pb.KeepRequest(
        namespace_id=asked.namespace_id,
        prefix=asked.prefix,
        lone=alone is not None,
        name=name,
        ttl_s=ttl_s,
        renewed=renewed,
    )
    return Call("Keep", request, lambda answer: Keep(**plain(answer.keep)))


def _alone(runs: Keys | None) -> list[bytes] | None:
    """The keys of pages that stand alone; None for those of a chain."""
    if not runs or not isinstance(runs[0], KeyRun):
        return None
    keys = []
    for run in runs:
        if not isinstance(run, KeyRun) or len(run.keys) != 1 or run.position:
            raise UsageError(
                "what is kept by KeyRuns are pages that stand alone, each a run of one key at"
                " position 0; of a chain pass the keys, one a page, from its first on",
                code="bad_run",
            )
        keys.append(run.keys[0])
    return keys


def keeps() -> Call[pb.ListKeepsResponse, ListedKeeps]:
    return Call("ListKeeps", pb.ListKeepsRequest(), _listed)


def _listed(answer: pb.ListKeepsResponse) -> ListedKeeps:
    listed = tuple(Keep(**plain(each)) for each in answer.keeps)
    return ListedKeeps(listed, answer.bytes, answer.capacity_bytes)


def remove_keep(name: str, space: Named | Opened | None) -> Call[pb.RemoveKeepsResponse, int]:
    return _remove(pb.RemoveKeepsRequest(name=name), space)


def remove_all_keeps(space: Named | Opened | None) -> Call[pb.RemoveKeepsResponse, int]:
    return _remove(pb.RemoveKeepsRequest(all=True), space)


def _remove(
    request: pb.RemoveKeepsRequest, space: Named | Opened | None
) -> Call[pb.RemoveKeepsResponse, int]:
    if space is not None:
        request.namespace_id = namespace_id(space)
    return Call("RemoveKeeps", request, lambda answer: answer.keeps)

"""Namespaces for whoever moves pages without being an engine: by what a listing tells of them, so
without their salts, and without counting as lookups. Stateless; thread-safe.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.client import Client
from kvwarehouse.client.namespace import OpenNamespace
from kvwarehouse.client.prompt import Keys
from kvwarehouse.client.routing import Question
from kvwarehouse.client.rpc import Call
from kvwarehouse.types import Namespace, Tier
from kvwarehouse.wire import warehouse_pb2 as pb


def open_listed(client: Client, stored: StoredNamespace) -> OpenNamespace:
    """One that the daemon has, salted or not. It is not registered: once it is forgotten, calls
    raise UsageError (code "namespace_unknown" or "unknown_namespace")."""
    space = Namespace.from_fields(stored.fields)
    # A listing has a digest in the salt's place, of which another id would follow. Calls name a
    # namespace by its id, and take from the fields no more than the shape of its pages.
    object.__setattr__(space, "id", stored.id)
    return OpenNamespace(space, client._channel, client._transport, reopen=False)


class HeldPrefix(NamedTuple):
    """Of the longest prefix that this daemon's own tiers have. What the remote store alone has is
    none of it: it may be gone there, and every host of a fleet reaches it alike."""

    pages: int
    nvme_pages: int
    """Of these, those that are on NVMe alone."""


def held_prefix(
    opened: OpenNamespace, tokens: Any = None, *, keys: Keys | None = None
) -> HeldPrefix:
    """Counts as no lookup, and touches no page."""
    if opened._transport.shared_memory is not None:
        tiers = opened.tiers(tokens, keys=keys, counted=False)
        missing = np.flatnonzero(~Tier.here(tiers))
        pages = int(missing[0]) if len(missing) else len(tiers)
        return HeldPrefix(pages, int(np.count_nonzero(tiers[:pages] == Tier.NVME)))
    listed = None if keys is None else [key for key in keys if isinstance(key, bytes)]
    question = Question(tokens, listed, namespace_id=opened.space.id)
    return opened._channel.ask(Call("WhoHas", question.to_wire(), _held))


def _held(answer: pb.WhoHasResponse) -> HeldPrefix:
    holding = next(iter(answer.holdings), pb.Holding())
    return HeldPrefix(holding.pages, holding.nvme_pages)

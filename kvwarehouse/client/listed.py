"""Namespaces for whoever moves pages without being an engine: by what a listing tells of them, so
without their salts, and without counting as lookups. Stateless; thread-safe.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.client import Client
from kvwarehouse.client.namespace import OpenNamespace
from kvwarehouse.client.prompt import Keys
from kvwarehouse.client.routing import Question
from kvwarehouse.client.rpc import Call
from kvwarehouse.types import Namespace
from kvwarehouse.wire import warehouse_pb2 as pb


def open_listed(client: Client, stored: StoredNamespace) -> OpenNamespace:
    """One that the daemon has, salted or not. It is not registered: once it is forgotten, calls
    raise UsageError (code "namespace_unknown" or "unknown_namespace")."""
    space = Namespace.from_fields(stored.fields)
    # A listing has a digest in the salt's place, of which another id would follow. Calls name a
    # namespace by its id, and take from the fields no more than the shape of its pages.
    object.__setattr__(space, "id", stored.id)
    return OpenNamespace(space, client._channel, client._transport, reopen=False)


def stored_pages(opened: OpenNamespace, tokens: Any = None, *, keys: Keys | None = None) -> int:
    """Pages of the longest stored prefix, as of lookup; counts as none, and touches no page."""
    if opened._transport.shared_memory is not None:
        missing = np.flatnonzero(opened.tiers(tokens, keys=keys, counted=False) == 0)
        return int(missing[0]) if len(missing) else _pages(opened, tokens, keys)
    listed = None if keys is None else [key for key in keys if isinstance(key, bytes)]
    question = Question(tokens, listed, namespace_id=opened.space.id)
    return opened._channel.ask(Call("WhoHas", question.to_wire(), _held))


def _pages(opened: OpenNamespace, tokens: Any, keys: Keys | None) -> int:
    return len(tokens) // opened.space.page_tokens if keys is None else len(keys)


def _held(answer: pb.WhoHasResponse) -> int:
    return answer.holdings[0].pages if answer.holdings else 0

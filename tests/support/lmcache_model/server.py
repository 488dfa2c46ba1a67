"""LMCache's server as the adapter sees it: the order in which its controllers call, one call after
another. A test that wants more at once uses `core` itself."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_connectors.lmcache.adapter_core import AdapterCore, StoreAnswer
from kvwarehouse_connectors.lmcache.settings import read_settings
from lmcache_model.objects import Key, Memory


def answered(call: Callable[[Callable[[Any], None]], None]) -> Any:
    """The answer to `call`, which is told exactly one place to put it."""
    answers: queue.Queue[Any] = queue.Queue()
    call(answers.put)
    return answers.get(timeout=DEADLINE_S)


class Server:
    """settings: with or without their prefix left out. Owns its adapter core."""

    def __init__(self, address: str, *, version: str = "0.5.6", **settings: Any) -> None:
        given = {"address": address, "weights": "w", **settings}
        params = {f"kvwarehouse.{name}": value for name, value in given.items()}
        self.core = AdapterCore(read_settings(params), version)

    def store(self, keys: Sequence[Key], memory: Sequence[Memory]) -> StoreAnswer:
        stored: StoreAnswer = answered(lambda answer: self.core.store(keys, memory, answer))
        return stored

    def lookup(self, keys: Sequence[Key], memory: Sequence[Memory] = ()) -> list[bool]:
        """memory: objects whose layouts are those of the keys' groups."""
        layouts = {
            key.object_group_id: one.layout
            for key, one in zip(keys, memory or [Memory()] * len(keys), strict=True)
        }
        found = answered(lambda answer: self.core.lookup(keys, layouts, answer))
        return [bool(one) for one in found]

    def load(self, keys: Sequence[Key], memory: Sequence[Memory]) -> list[bool]:
        """As after a lookup: without unlocking."""
        loaded = answered(lambda answer: self.core.load(keys, memory, answer))
        return [bool(one) for one in np.asarray(loaded)]

    def prefetch(self, keys: Sequence[Key], memory: Sequence[Memory]) -> list[bool]:
        """Lookup, load of what was found, unlock: of each key whether its memory holds it."""
        found = self.lookup(keys, memory)
        chosen = [place for place, there in enumerate(found) if there]
        if not chosen:
            return found
        named = [keys[place] for place in chosen]
        loaded = self.load(named, [memory[place] for place in chosen])
        self.core.unlock(named)
        for place, came in zip(chosen, loaded, strict=True):
            found[place] = came
        return found

    def totals(self) -> dict[str, int]:
        totals: dict[str, int] = self.core.status()["totals"]
        return totals

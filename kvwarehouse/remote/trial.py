"""Each call that a node makes to its store, by itself, on objects that are gone afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.names import FleetNames
from kvwarehouse.remote.object_store import ObjectStore, StoreAbilities

_BODY = b"kvwarehouse: whether this store does what a remote tier asks of it"


@dataclass(frozen=True)
class Tried:
    call: str
    problem: str
    """"": it does."""
    is_needed: bool = True
    """Nothing works without it."""


@dataclass(frozen=True)
class TrialResult:
    calls: tuple[Tried, ...]
    abilities: StoreAbilities | None
    """None: the store does not do what finding them out needs."""

    @property
    def works(self) -> bool:
        return not any(each.problem and each.is_needed for each in self.calls)


class StoreTrial:
    def __init__(self, store: ObjectStore, names: FleetNames) -> None:
        self._store, self._prefix = store, names.probes_prefix
        self._first, self._second = (f"{self._prefix}{secrets.token_hex(8)}" for _ in range(2))

    def run(self) -> TrialResult:
        """Never raises TransportError: what failed is in the result."""
        calls = [self._try("put", self._put)]
        if not calls[0].problem:
            calls += [
                self._try("get", self._get),
                self._try("list", self._list),
                self._try("copy", self._copy, is_needed=False),
                self._try("delete", self._delete),
            ]
        abilities = None
        if not any(each.problem and each.is_needed for each in calls):
            try:
                abilities = self._store.probe(self._prefix)
            except TransportError as error:
                calls.append(Tried("probe", error.message))
        return TrialResult(tuple(calls), abilities)

    @staticmethod
    def _try(call: str, do: Callable[[], str], *, is_needed: bool = True) -> Tried:
        try:
            return Tried(call, do(), is_needed)
        except TransportError as error:
            return Tried(call, error.message, is_needed)

    def _put(self) -> str:
        self._store.put(self._first, _BODY)
        return ""

    def _get(self) -> str:
        if self._read(self._first, 0, len(_BODY)) != _BODY:
            return "the object that was put a moment ago is not what comes back"
        if self._read(self._first, 5, 10) != _BODY[5:10]:
            return "a range of an object is not what comes back"
        return ""

    def _list(self) -> str:
        found = {item.name: item.size_bytes for item in self._store.list(self._prefix)}
        if found.get(self._first) != len(_BODY):
            return "a listing does not have the object that was put a moment ago"
        return ""

    def _copy(self) -> str:
        self._store.copy(self._first, self._second)
        if self._read(self._second, 0, len(_BODY)) != _BODY:
            return "a copy is not what was copied"
        return ""

    def _delete(self) -> str:
        self._store.delete([self._first, self._second])
        left = {item.name for item in self._store.list(self._prefix)}
        if left & {self._first, self._second}:
            return "an object is listed that was deleted a moment ago"
        return ""

    def _read(self, name: str, begin: int, end: int) -> bytes | None:
        data = self._store.get(name, begin, end)
        return None if data is None else bytes(data)

"""What ranks tell each other: mpi_broadcast and mpi_allgather between rank 0 and the others.

A rank that fails says so in place of its answer, so that the others fail too instead of waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_DEADLINE_S = 60.0


class RankFailedError(AssertionError):
    """Another rank raised. `kind`, `text`: what."""

    def __init__(self, rank: int, kind: str, text: str) -> None:
        super().__init__(f"rank {rank} raised {kind}: {text}")
        self.kind = kind
        self.text = text


class Collectives:
    """peers: of rank 0, connections to the ranks 1, 2, ...; of another, the one to rank 0."""

    def __init__(self, rank: int, peers: Sequence[Connection]) -> None:
        self.rank = rank
        self._peers = peers

    def broadcast(self, value: Any) -> Any:
        if self.rank:
            return self._receive(self._peers[0], 0)
        for peer in self._peers:
            peer.send(("value", value))  # pickled, as MPI does
        return value

    def allgather(self, value: Any) -> list[Any]:
        if self.rank:
            self._peers[0].send(("value", value))
            return list(self._receive(self._peers[0], 0))
        gathered = [value, *(self._receive(p, n) for n, p in enumerate(self._peers, 1))]
        for peer in self._peers:
            peer.send(("value", gathered))
        return gathered

    def fail(self, error: BaseException) -> None:
        for peer in self._peers:
            with suppress(OSError):  # it is gone already
                peer.send(("failure", (self.rank, type(error).__name__, str(error))))

    def _receive(self, peer: Connection, rank: int) -> Any:
        if not peer.poll(_DEADLINE_S):
            raise AssertionError(f"rank {rank} says nothing for {_DEADLINE_S:.0f} s")
        kind, value = peer.recv()
        if kind == "failure":
            raise RankFailedError(*value)
        return value

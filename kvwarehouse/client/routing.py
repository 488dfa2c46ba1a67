"""Which of several warehouses has how much of a prompt; scoring.py chooses among them.

A warehouse is the pages of one daemon; a request that is routed to its host finds them there. This
asks the daemons, all at once and within a bound; one that does not answer is not waited for.

Stateless; thread-safe. One call makes a connection to each warehouse and ends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from kvwarehouse.client.endpoint import Address, Credentials, checked_timeout, parse_address
from kvwarehouse.client.prompt import checked_keys, token_array
from kvwarehouse.client.rpc import Call, Channel
from kvwarehouse.errors import UsageError, WarehouseError
from kvwarehouse.wire import prefix_to_wire
from kvwarehouse.wire import warehouse_pb2 as pb

MAX_WAREHOUSES: Final = 256
_THREADS: Final = 32
_TIES_TOKENS: Final = 256  # of a prompt's beginning: what a conversation or a template shares


@dataclass(frozen=True)
class Holding:
    """What one namespace of a warehouse has of a prompt: its longest stored prefix."""

    namespace_id: bytes
    model: str
    page_tokens: int
    page_bytes: int
    """Of one shard."""
    shards: int
    pages: int
    dram_pages: int
    """Of pages, those in DRAM; the others are on NVMe."""

    @property
    def tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def dram_tokens(self) -> int:
        return self.dram_pages * self.page_tokens

    @property
    def nvme_tokens(self) -> int:
        return self.tokens - self.dram_tokens


@dataclass(frozen=True)
class Answer:
    """What one warehouse answered, or why it did not."""

    address: str
    """As it was given."""
    warehouse_id: bytes = b""
    name: str = ""
    draining: bool = False
    holding: Holding | None = None
    """The longest of its namespaces'; None where it has no namespace that was asked for."""
    streams: int = 0
    promotions_in_flight: int = 0
    nvme_read_bytes_per_s: int = 0
    seconds: float = 0.0
    problem: str = ""
    """Why it is left out: it did not answer in time, or refused."""


@dataclass(frozen=True)
class Question:
    """A prompt, by tokens or by the engine's keys (one a page), and what to look in: a namespace by
    its id; else, of the namespaces without a salt, those of a model by its name, or all."""

    tokens: Any = None
    keys: Sequence[bytes] | None = None
    model: str = ""
    namespace_id: bytes = b""

    def to_wire(self) -> pb.WhoHasRequest:
        """Raises UsageError for a prompt that is none."""
        if (self.tokens is None) == (self.keys is None):
            raise UsageError("pass either tokens or keys, one of them", code="bad_prefix")
        if self.model and self.namespace_id:
            raise UsageError("pass either model or namespace_id, not both", code="bad_namespace")
        if self.keys is not None:
            keys = checked_keys(list(self.keys))
            assert isinstance(keys, list)
            prefix = prefix_to_wire(None, keys)
        else:
            prefix = prefix_to_wire(token_array(self.tokens), None)
        if self.namespace_id:
            return pb.WhoHasRequest(prefix=prefix, namespace_id=self.namespace_id)
        if self.model:
            return pb.WhoHasRequest(prefix=prefix, model=self.model)
        return pb.WhoHasRequest(prefix=prefix)

    def beginning(self) -> bytes:
        """What prompts that share a beginning have in common."""
        if self.keys is not None:
            return bytes(self.keys[0]) if self.keys else b""
        return token_array(self.tokens)[:_TIES_TOKENS].tobytes()


def who_has(
    addresses: Sequence[str],
    question: Question,
    *,
    token: str | None = None,
    tls: bool | str | os.PathLike[str] | None = None,
    timeout_s: float = 1.0,
) -> list[Answer]:
    """What each warehouse has, in the order of `addresses`; blocks for the slowest of them, at most
    about `timeout_s`. One that does not answer has its `problem` set; nothing is raised for it.

    token, tls: for addresses host:port, as in kvwarehouse.connect. Raises UsageError for an address
    or a prompt that is none, and for more than MAX_WAREHOUSES addresses."""
    timeout_s = checked_timeout(timeout_s)
    asked = questions(addresses, question, Credentials(token, tls))
    until = time.monotonic() + timeout_s
    with ThreadPoolExecutor(min(_THREADS, len(asked))) as pool:
        answers = [pool.submit(_ask, one, until) for one in asked]
        return [each.result() for each in answers]


def _ask(one: AskOne, until: float) -> Answer:
    began = time.monotonic()
    if until <= began:
        return one.unasked()
    channel = Channel(one.where, one.credentials, until - began)
    try:
        return channel.ask(one.call(began))
    except WarehouseError as error:
        return one.failed(error, began)
    finally:
        channel.close()


def questions(
    addresses: Sequence[str], question: Question, credentials: Credentials
) -> list[AskOne]:
    """What goes to whom, checked; `who_has` says what is refused."""
    if not 1 <= len(addresses) <= MAX_WAREHOUSES:
        raise UsageError(
            f"{len(addresses)} addresses; give 1 to {MAX_WAREHOUSES}", code="bad_address"
        )
    if len(set(addresses)) != len(addresses):
        raise UsageError("an address is given twice; give each once", code="bad_address")
    request = question.to_wire()
    asked = []
    for address in addresses:
        where = parse_address(address)
        trust = Credentials() if where.local else credentials
        trust.check(where)
        asked.append(AskOne(address, where, trust, request))
    return asked


@dataclass(frozen=True)
class AskOne:
    """The question to one warehouse, and what its answer or silence means."""

    address: str
    where: Address
    credentials: Credentials
    request: pb.WhoHasRequest

    def call(self, began: float) -> Call[pb.WhoHasResponse, Answer]:
        """began: by time.monotonic."""

        def decode(answer: pb.WhoHasResponse) -> Answer:
            return Answer(
                address=self.address,
                warehouse_id=answer.warehouse_id,
                name=answer.name,
                draining=answer.draining,
                holding=_holding(answer.holdings[0]) if answer.holdings else None,
                streams=answer.load.streams,
                promotions_in_flight=answer.load.promotions_in_flight,
                nvme_read_bytes_per_s=answer.load.nvme_read_bytes_per_s,
                seconds=time.monotonic() - began,
            )

        return Call("WhoHas", self.request, decode)

    def unasked(self) -> Answer:
        return Answer(self.address, problem="was not asked: the others took all of the time")

    def failed(self, error: WarehouseError, began: float) -> Answer:
        return Answer(self.address, seconds=time.monotonic() - began, problem=error.message)


def _holding(held: pb.Holding) -> Holding:
    return Holding(
        namespace_id=held.namespace_id,
        model=held.model,
        page_tokens=held.page_tokens,
        page_bytes=held.page_bytes,
        shards=held.shards,
        pages=held.pages,
        dram_pages=held.dram_pages,
    )

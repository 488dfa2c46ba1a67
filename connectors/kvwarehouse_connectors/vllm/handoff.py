"""The hand-off of a prompt between engines: the record one gives, and how long the other waits.

A producer's answer carries the record; a proxy passes it on unread; the consumer waits for the
pages that it speaks of, while they are still being stored. The record came through strangers'
hands: it decides whether to wait and nothing else. What is loaded is found by the consumer's own
keys and verified as always, so the worst that a forged record can cost is one wait.

Pure; knows no vLLM. A Handoff belongs to one request; not thread-safe.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final

RECORD: Final = "kvwarehouse"
"""The record's name in kv_transfer_params."""
VERSION: Final = 1

_DIGEST_BYTES: Final = 16
_MOST_TOKENS: Final = 1 << 31
_MOST_S: Final = float(1 << 40)


class HandoffOutcome(Enum):
    """How it ended with a record; each is counted as `handoff_NAME`. The last six are reasons not
    to wait."""

    COMPLETE = "complete"
    EXPIRED = "expired"
    MALFORMED = "malformed"
    OTHER_VERSION = "other_version"
    OTHER_WAREHOUSE = "other_warehouse"
    OTHER_NAMESPACE = "other_namespace"
    OTHER_PROMPT = "other_prompt"
    LATE = "late"


@dataclass(frozen=True)
class Record:
    """What a producer gave to be stored."""

    warehouse: str
    """Its daemon's warehouse: 32 hex digits."""
    namespaces: str
    """`digest` of the ids of the namespaces of its cache groups."""
    prompt: str
    """`digest` of the keys of its last blocks, one of each cache group."""
    tokens: int
    """From the first on, at whole blocks of all groups."""
    made_s: float
    """On this host's boot clock, when the last of them were on their way."""


def digest(parts: Iterable[bytes]) -> str:
    """32 hex digits of some ids or keys, which differ in length and number."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(4, "little") + part)
    return state.hexdigest()


def encode(record: Record) -> dict[str, Any]:
    """As kv_transfer_params: plain JSON."""
    return {RECORD: {"version": VERSION, **asdict(record)}}


def decode(params: Mapping[str, Any] | None) -> Record | HandoffOutcome | None:
    """The record in a request's kv_transfer_params; why it is none; None where there is nothing.
    A version that is not ours says nothing of its other fields."""
    if params is None or params.get(RECORD) is None:
        return None
    fields = params[RECORD]
    if not isinstance(fields, Mapping):
        return HandoffOutcome.MALFORMED
    version = fields.get("version")
    if not _is_number(version, int):
        return HandoffOutcome.MALFORMED
    if version != VERSION:
        return HandoffOutcome.OTHER_VERSION
    if set(fields) != {"version", *Record.__dataclass_fields__}:
        return HandoffOutcome.MALFORMED
    record = Record(**{name: value for name, value in fields.items() if name != "version"})
    return record if _is_sound(record) else HandoffOutcome.MALFORMED


def boot_s() -> float:
    """The clock of records: one for all processes of a host, and it goes on while the host
    sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Handoff:
    """A request's wait. wait_s: at most so long, counted from when the record was made: a producer
    makes it when its last pages are on their way already. A record whose clock is ahead of ours was
    made now."""

    def __init__(self, record: Record, wait_s: float) -> None:
        self.record = record
        self._wait_s = wait_s
        self._until_s = math.nan

    def refusal(self, warehouse: str, namespaces: str, prompt: str) -> HandoffOutcome | None:
        """Why this record is of no use to a request that has these; prompt: "" where it has not as
        many tokens."""
        if self.record.warehouse != warehouse:
            return HandoffOutcome.OTHER_WAREHOUSE
        if self.record.namespaces != namespaces:
            return HandoffOutcome.OTHER_NAMESPACE
        if self.record.prompt != prompt:
            return HandoffOutcome.OTHER_PROMPT
        return None

    @property
    def waits(self) -> bool:
        """Whether a wait has begun."""
        return not math.isnan(self._until_s)

    def judge(self, now_s: float, *, complete: bool, alive: bool) -> HandoffOutcome | None:
        """None: wait on, and ask again. complete: its pages are there. alive: whether the daemon
        is, without which nothing more will come."""
        if complete:
            return HandoffOutcome.COMPLETE
        if not self.waits:
            until_s = min(self.record.made_s, now_s) + self._wait_s
            if now_s >= until_s:
                return HandoffOutcome.LATE
            self._until_s = until_s
        return None if alive and now_s < self._until_s else HandoffOutcome.EXPIRED


def _is_sound(record: Record) -> bool:
    names = (record.warehouse, record.namespaces, record.prompt)
    return (
        all(isinstance(name, str) and len(name) == 2 * _DIGEST_BYTES for name in names)
        and _is_number(record.tokens, int)
        and 0 < record.tokens < _MOST_TOKENS
        and _is_number(record.made_s, (int, float))
        and 0 <= record.made_s < _MOST_S
    )


def _is_number(value: Any, kind: type | tuple[type, ...]) -> bool:
    """JSON's true is no number, though Python's is."""
    return isinstance(value, kind) and not isinstance(value, bool)

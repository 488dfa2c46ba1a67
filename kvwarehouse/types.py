"""The values that cross the public surface: Namespace and the results of calls.

All are frozen; thread-safe by being immutable. No I/O and no native code here, so that every
layer can import this.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvwarehouse.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The same numbers as native/base/types.h; tests/unit/test_types.py compares them.
MAX_SHARDS = 64
MAX_PAGE_TOKENS = 4096
MAX_PAGE_BYTES = 1 << 30
MAX_TEXT_CHARS = 1024
MAX_EXTRA_FIELDS = 64
MAX_NAMESPACE_BYTES = 8 << 10
"""All fields of a namespace, as JSON in the ledger of the warehouse that takes it."""
MAX_TOKEN = 2**32 - 1
MAX_POSITION = 2**31 - 1

NAMESPACE_ID_BYTES = 16
CHAIN_SCHEME = "kvw-xxh3-128/1"
"""The warehouse's own keyed prefix chain (native/chain/chain.h)."""

_ID_VERSION = b"kvwarehouse.namespace/1"
_SALT_DIGITS = 8
_REQUIRED_TEXTS = ("model", "weights", "dtype", "layout")
_OPTIONAL_TEXTS = (
    "kv_dtype",
    "attention_backend",
    "cache_group",
    "adapter",
    "salt",
    "hash_scheme",
)
_NUMBERS = (
    ("page_tokens", MAX_PAGE_TOKENS),
    ("page_bytes", MAX_PAGE_BYTES),
    ("shards", MAX_SHARDS),
)


@dataclass(frozen=True)
class Namespace:
    """Everything that must match for KV to be interchangeable. Two namespaces share pages exactly
    when every field is equal; `id` is a digest of all of them.

    Fields are checked when it is made: UsageError (code "bad_namespace") names the field, the
    value and the fix. Texts have at most 1024 characters and no control characters."""

    model: str
    """Name of the model, for people and for telling models apart."""
    weights: str
    """Fingerprint of the weights themselves: `kvw.fingerprint(path)`, never only a path."""
    dtype: str
    """Type the model computes in, such as "bfloat16"."""
    layout: str
    """Who writes the bytes of a page and in which version of its order, as "writer/version"."""
    page_tokens: int
    """Tokens of a page, 1 to 4096."""
    page_bytes: int
    """Bytes of one shard of a page, 1 to 1 GiB."""
    shards: int = 1
    """Ranks that hold a part of every page (the tensor-parallel size), 1 to 64."""
    kv_dtype: str = ""
    """Type of the stored KV, where it differs from `dtype` (such as "fp8_e4m3")."""
    attention_backend: str = ""
    """The attention implementation, where the bytes of a page depend on it."""
    cache_group: str = ""
    """Which of a hybrid model's cache groups; each is its own namespace."""
    adapter: str = ""
    """Fingerprint of a LoRA or another adapter that changes the KV."""
    salt: str = ""
    """Separates those who must not share, such as tenants of one engine."""
    hash_scheme: str = CHAIN_SCHEME
    """How keys are made from tokens; an engine that passes its own block hashes names them here."""
    extra: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Whatever else the bytes depend on, text to text, at most 64 entries. A warehouse takes 8 KiB
    of all fields together (as JSON), and refuses to open more (UsageError "namespace_too_large"):
    put fingerprints here, not what they are of."""
    id: bytes = field(init=False, repr=False, compare=False)
    """16 bytes; a digest of every field above."""

    def __post_init__(self) -> None:
        for name in _REQUIRED_TEXTS:
            _check_text(name, getattr(self, name), required=True)
        for name in _OPTIONAL_TEXTS:
            _check_text(name, getattr(self, name), required=name == "hash_scheme")
        for name, largest in _NUMBERS:
            object.__setattr__(self, name, _checked_number(name, getattr(self, name), largest))
        object.__setattr__(self, "extra", MappingProxyType(_checked_extra(self.extra)))
        object.__setattr__(self, "id", _digest(self))

    def to_fields(self) -> dict[str, Any]:
        """All fields as plain JSON-able values, for the wire and the ledger."""
        names = (*_REQUIRED_TEXTS, *(name for name, _ in _NUMBERS), *_OPTIONAL_TEXTS)
        return {**{name: getattr(self, name) for name in names}, "extra": dict(self.extra)}

    def shown_fields(self) -> dict[str, Any]:
        """As to_fields, for who may not have the salt: a digest of it, "sha256:" and 8 hex digits,
        in its place. It tells salts apart; one that can be guessed can be guessed from it."""
        digest = hashlib.sha256(self.salt.encode()).hexdigest()[:_SALT_DIGITS]
        return {**self.to_fields(), "salt": f"sha256:{digest}" if self.salt else ""}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Namespace:
        """The namespace that `to_fields` described. Raises UsageError on a missing or unknown
        field: a field this version does not know would silently change what may be shared."""
        known = {name for name in cls.__dataclass_fields__ if name != "id"}
        for name in fields:
            if name not in known:
                raise _bad(name, fields[name], "is not a field of this version; upgrade it")
        missing = [name for name in ("page_tokens", "page_bytes") if name not in fields]
        missing += [name for name in _REQUIRED_TEXTS if name not in fields]
        if missing:
            raise _bad(missing[0], None, "is missing; give it a value")
        return cls(**fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Namespace.from_fields, (self.to_fields(),))


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Consecutive pages of one prompt, named by the engine's own keys, which chain the pages before
    them. A page is found again only by the position and parent it was stored with: as part of a
    list from the root, of any run of the same prompt, or, where it was, as a page that stands alone
    (one key at position 0).

    Checked when it is made: UsageError (code "bad_run"). The keys are checked by the call that they
    are passed to, and must not change before it returns."""

    keys: Sequence[bytes]
    """1 to 64 bytes a page."""
    position: int = 0
    """Page number of the first within its prompt, below 2^31."""
    parent: bytes | None = None
    """The engine's key of the page before; None exactly where `position` is 0."""

    def __post_init__(self) -> None:
        # Engines make thousands a step, hence one expression for the good case.
        position = self.position
        if (
            type(position) is not int
            or not 0 <= position <= MAX_POSITION
            or (position == 0) != (self.parent is None)
        ):
            raise _bad_run(position, self.parent)


@dataclass(frozen=True)
class MissingPages:
    """The first pages of a request that a namespace does not have."""

    namespace_id: bytes
    run: KeyRun
    """A few of them: RequestNote.MAX_KEYS is for all those of a request."""


@dataclass(frozen=True)
class RequestNote:
    """What an engine's connector found for a request. Tokens are counted from the prompt's
    begin. The daemon refuses what is beyond a bound."""

    MAX_ID_BYTES: ClassVar[int] = 256
    """Of a request, and of an engine."""
    MAX_NAMESPACES: ClassVar[int] = 16
    MAX_KEYS: ClassVar[int] = 64
    """In all its namespaces."""

    request_id: str
    """The engine's own, as its log has it."""
    tokens: int
    """Of the prompt, and of what was generated before the request was preempted."""
    engine_tokens: int
    """That the engine had itself."""
    found_tokens: int
    """Up to where all of it is in the engine, or was found in the warehouse."""
    load_tokens: int
    """Up to where the engine loads; fewer than were found where computing is faster."""
    at_ns: int = 0
    """Wall clock, when it was looked up; 0: as the note comes."""
    missing: tuple[MissingPages, ...] = ()
    engine: str = ""
    """Tells engines apart, whose ids may be alike."""


class Tier(IntEnum):
    """Where a page is read from now: the fastest tier that has it. HBM: for clients that load into
    the memory of the tier's device; those pages are in DRAM as well, and others read them there.
    REMOTE: in the remote store, probably; whether it comes a load finds out, in the time that it is
    given."""

    MISSING = 0
    DRAM = 1
    NVME = 2
    HBM = 3
    REMOTE = 4

    @staticmethod
    def near(tiers: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which of them are in DRAM, and so loaded without waiting for a disk or a network."""
        found: NDArray[np.bool_] = (tiers == Tier.DRAM) | (tiers == Tier.HBM)
        return found

    @staticmethod
    def here(tiers: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which of them the daemon's own tiers have. What the remote store alone has is not one of
        them: every host reaches it alike, and it may be gone there."""
        found: NDArray[np.bool_] = (tiers != Tier.MISSING) & (tiers != Tier.REMOTE)
        return found


@dataclass(frozen=True)
class Match:
    """The longest stored prefix: `pages` of them, `tokens` tokens long. `by_tier` says where each
    page is read from now, the fastest tier that has it: {"hbm": .., "dram": .., "nvme": ..,
    "remote": ..}. In HBM: for clients that load into the memory of that tier's device, see
    docs/gpu.md. Remote: pages that the remote store has, probably, behind those stored here."""

    pages: int
    tokens: int
    by_tier: dict[str, int]


@dataclass(frozen=True)
class StoreResult:
    """What became of the pages of one store: they add up to the pages that were passed."""

    stored: int
    """Pages (of this shard) written and sealed by this call."""
    already: int
    """Pages that were there, sealed, and are as safe as those that this call stored."""
    dropped: dict[str, int]
    """Pages not stored, by reason; empty when there are none. "busy": another client was writing
    them, which may yet fail, so that nobody can promise them."""

    @property
    def dropped_pages(self) -> int:
        return sum(self.dropped.values())


class Loaded(int):
    """Pages that a load filled, in order: an int that also knows why the rest was not filled."""

    missed: dict[str, int]
    """Reason to pages, for those asked for and not filled; empty when all were."""

    def __new__(cls, pages: int, missed: Mapping[str, int] | None = None) -> Self:
        self = super().__new__(cls, pages)
        self.missed = dict(missed or {})
        return self

    def __repr__(self) -> str:
        return f"Loaded({int(self)}, missed={self.missed})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Loaded, (int(self), self.missed))


@dataclass(frozen=True)
class Control:
    """What the daemon publishes in shared memory, a few times a second while it lives. After its
    death it stays as it was, and only the heartbeat ages."""

    incarnation: int
    """Rises with every daemon of this warehouse."""
    heartbeat_age_s: float
    """A daemon that serves beats ten times a second; one that is stopped or gone does not."""
    draining: bool
    """It refuses stores, because it is ending or was told to."""
    nvme_read_bytes_per_s: int
    """What the disk gave while it was busy, smoothed; 0 where it was not measured yet."""
    nvme_reads_queued: int
    """Pages (records of all their shards) that are being read from NVMe, or wait for it."""
    nvme_write_queue_bytes: int
    """Records that wait to be written to NVMe."""
    reserve_limit_bytes: int
    """What all sessions of one process may have reserved and not finished storing, where no other
    process has any: half of what may be unfinished at all."""
    pin_limit_bytes: int
    """What all sessions of one process may pin together, beside what others pin now."""
    warehouse_id: str = ""
    """32 hex digits; the same for every daemon of this warehouse, as in its status."""
    remote_serving: bool = False
    """Pages that the remote store has may be fetched now."""
    remote_read_bytes_per_s: int = 0
    """What the remote store gives of one object at a time, smoothed; 0: not measured yet."""
    remote_first_byte_ns: int = 0
    """How long that takes to begin, likewise."""
    remote_queued_bytes: int = 0
    """Of objects that are being fetched, or wait for it."""


@dataclass(frozen=True)
class FlushResult:
    """What a flush reached. `pending` is not zero when its time ran out."""

    flushed: int
    not_admitted: int
    pending: int


class ClearedPages(int):
    """How many pages a clear removed, and what became of it in the fleet of a daemon with a remote
    tier."""

    remote: str = ""
    """"": there is no remote tier; "done": its store has the clear, and the hosts that reach it
    follow within seconds; "owed": the store did not answer, and has it when it does."""

    def __new__(cls, pages: int, remote: str = "") -> Self:
        made = super().__new__(cls, pages)
        made.remote = remote
        return made


@dataclass(frozen=True)
class TierCheck:
    """What a check found in one tier, "dram" or "nvme". Counts are copies: a page that is in both
    tiers has one in each."""

    tier: str
    pages: int = 0
    size_bytes: int = 0
    damaged: int = 0
    dropped: int = 0
    dropped_bytes: int = 0


@dataclass(frozen=True)
class BadCopy:
    """A page that is not what was stored, in one tier. reason: "header", "digest"; on NVMe also
    "place" (a record of another place or time), "key", "namespace", "io_error" (not readable)."""

    key: bytes
    tier: str
    reason: str


@dataclass(frozen=True)
class CheckProgress:
    """What a check has found so far; `bad`: what is new since the one before."""

    tiers: tuple[TierCheck, ...] = ()
    bad: tuple[BadCopy, ...] = ()
    done: bool = False

    @property
    def checked(self) -> int:
        return sum(tier.pages for tier in self.tiers)

    @property
    def size_bytes(self) -> int:
        return sum(tier.size_bytes for tier in self.tiers)

    @property
    def damaged(self) -> int:
        return sum(tier.damaged for tier in self.tiers)

    @property
    def quarantined(self) -> int:
        return sum(tier.dropped for tier in self.tiers)

    def advanced(
        self, tiers: Sequence[TierCheck], bad: Sequence[BadCopy], *, done: bool
    ) -> CheckProgress:
        """With the next stretch of pages; its tiers in the order of ours."""
        known = self.tiers or [TierCheck(tier.tier) for tier in tiers]
        summed = (_sum(old, new) for old, new in zip(known, tiers, strict=True))
        return CheckProgress(tuple(summed), tuple(bad), done)


def _sum(old: TierCheck, new: TierCheck) -> TierCheck:
    return TierCheck(
        old.tier,
        old.pages + new.pages,
        old.size_bytes + new.size_bytes,
        old.damaged + new.damaged,
        old.dropped + new.dropped,
        old.dropped_bytes + new.dropped_bytes,
    )


def _bad_run(position: object, parent: object) -> UsageError:
    if type(position) is not int or not 0 <= position <= MAX_POSITION:
        problem = f"position is no whole number from 0 to {MAX_POSITION}"
    elif position == 0:
        problem = "the first page of a prompt has no parent; leave parent out, or give the position"
    else:
        problem = "pass as parent the key of the page before, by which the page is checked"
    return UsageError(
        f"KeyRun(position={position!r}, parent={parent!r}): {problem}",
        code="bad_run",
        context={"position": position},
    )


def _check_text(name: str, value: object, *, required: bool) -> None:
    if not isinstance(value, str):
        raise _bad(name, value, f"is {_kind(value)}; give it text")
    if required and not value.strip():
        raise _bad(name, value, "is empty; name it, because KV is shared by this")
    if len(value) > MAX_TEXT_CHARS:
        raise _bad(
            name,
            value[:40] + "...",
            f"has {len(value)} characters; at most {MAX_TEXT_CHARS} (pass a fingerprint instead)",
        )
    if not value.isprintable():
        raise _bad(name, value, "has control or unprintable characters; remove them")


def _checked_number(name: str, value: Any, largest: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise _bad(name, value, f"is {_kind(value)}; give it a whole number from 1 to {largest}")
    if not 1 <= number <= largest:
        raise _bad(name, value, f"is out of range; use 1 to {largest}")
    return number


def _checked_extra(extra: object) -> dict[str, str]:
    if not isinstance(extra, Mapping):
        raise _bad("extra", extra, f"is {_kind(extra)}; give it a mapping of text to text")
    if len(extra) > MAX_EXTRA_FIELDS:
        raise _bad("extra", f"({len(extra)} entries)", f"has over {MAX_EXTRA_FIELDS} entries")
    for name, value in extra.items():
        _check_text("name in extra", name, required=True)
        _check_text(f"extra[{name!r}]", value, required=False)
    return dict(sorted(extra.items()))


def _digest(space: Namespace) -> bytes:
    """blake2b-128 over the version and every field as length-prefixed UTF-8 (docs/format.md).

    Optional fields at their defaults are left out, so that a field added later, at its default,
    changes no id."""
    items = [(name, getattr(space, name)) for name in _REQUIRED_TEXTS]
    items += [(name, str(getattr(space, name))) for name, _ in _NUMBERS]
    defaults = Namespace.__dataclass_fields__
    for name in _OPTIONAL_TEXTS:
        if getattr(space, name) != defaults[name].default:
            items.append((name, getattr(space, name)))
    items += [(f"extra.{name}", value) for name, value in space.extra.items()]
    state = hashlib.blake2b(digest_size=NAMESPACE_ID_BYTES)
    state.update(_ID_VERSION)
    for item in items:
        for text in item:
            encoded = text.encode("utf-8")
            state.update(len(encoded).to_bytes(4, "little") + encoded)
    return state.digest()


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def _bad(name: str, value: object, problem: str) -> UsageError:
    return UsageError(
        f"namespace field {name} = {value!r} {problem}",
        code="bad_namespace",
        context={"field": name, "value": value},
    )

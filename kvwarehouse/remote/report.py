"""What the daemon and its remote worker tell each other in lines of JSON. To the worker's stdin:
the settings, the first line; then clears, and what was heard of epochs. From its stdout: reports,
events, epochs, and which clears are in the store.

Whoever reads a line refuses what is not exactly so: a field that is missing, unknown, of another
type or out of bounds. Nothing here is a secret. Stateless; thread-safe.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from kvwarehouse.errors import InternalError

LINE_BYTES_MAX: Final = 64 << 10
"""A line that is longer is none."""

STATES: Final = ("starting", "serving", "failing", "refused", "full")
"""What a worker says of its store. The daemon adds "off", where it has no worker."""

WRITES: Final = ("reused", "all", "none")
"""Which runs are put: those used a second time, all, or none."""

EXIT_FAILED: Final = 70
EXIT_LINK_CLOSED: Final = 75
EXIT_HUNG: Final = 76

EXITS: Final[Mapping[int, str]] = {
    EXIT_FAILED: "by a bug; the event remote_worker_failed or its stderr says which",
    EXIT_LINK_CLOSED: "because the core closed its link",
    EXIT_HUNG: "because a call of the store hangs; look at the mount, if it is a folder",
}
"""Why a worker ends by itself, by its exit code."""

FieldValue = str | int | float

EPOCHS_PER_LINE: Final = 500
"""Of namespaces: more go into several lines."""
EPOCHS_END: Final = 1 << 63
"""A fleet's epochs are below."""

_COUNT_MAX: Final = (1 << 64) - 1
_EVENT_FIELDS_MAX: Final = 32


class _Line:
    """A frozen dataclass as a line: its fields, and `kind` where it has one."""

    KIND: ClassVar[str] = ""

    def to_line(self) -> bytes:
        """With its newline."""
        values = {name: getattr(self, name) for name in _kinds_of_fields(type(self))}
        return _encoded({"kind": self.KIND} if self.KIND else {}, values)

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Raises InternalError for a line that is none of this class."""
        values = _decoded(line)
        if cls.KIND and values.pop("kind", None) != cls.KIND:
            raise _bad(f"has no kind {cls.KIND!r}")
        kinds = _kinds_of_fields(cls)
        if values.keys() != kinds.keys():
            names = ", ".join(sorted(values.keys() ^ kinds.keys()))
            raise _bad(f"has not the fields of {cls.__name__}: {names}")
        return cls(**{name: _checked(name, values[name], kind) for name, kind in kinds.items()})


@dataclass(frozen=True)
class WorkerSettings(_Line):
    """What a worker is told once, at its start. An empty text is one that was not set."""

    link_fd: int
    """The worker's end of the link for puts, a descriptor that it inherits."""
    get_link_fd: int
    """That of the link for gets; 0 without `read`."""
    socket: str
    """Where the daemon listens."""
    presence_path: str
    fleet_id: str
    """32 hex digits."""
    node: int
    """Who this daemon is in the fleet: 64 bits."""
    url: str
    endpoint: str
    region: str
    ca_file: str
    connect_s: float
    get_deadline_s: float
    put_deadline_s: float
    puts: int
    """Threads that put."""
    gets: int
    """Threads that get."""
    read: bool
    """Whether loads come from the store."""
    write_bytes_per_s: int
    """0: no bound."""
    write: str
    """One of WRITES."""
    capacity_bytes: int
    """Of the whole fleet."""
    ttl_days: int
    objects: int
    """How many the presence filter is made for."""

    def __post_init__(self) -> None:
        _checked_id("fleet_id", self.fleet_id)
        _one_of("write", self.write, WRITES)

    @property
    def links(self) -> tuple[int, ...]:
        """The descriptors that the worker inherits."""
        return (self.link_fd, self.get_link_fd) if self.read else (self.link_fd,)


@dataclass(frozen=True)
class WorkerReport(_Line):
    """How a worker is, about once a second; what counts, counts since its start."""

    KIND: ClassVar[str] = "report"

    state: str
    """One of STATES."""
    reason: str = ""
    """Why it does not serve, and what to do."""
    used_bytes: int = 0
    """By the whole fleet, as far as this worker knows."""
    objects: int = 0
    """Of pages in the store, as the last listing counted them, and put by this worker since."""
    objects_max: int = 0
    nodes: int = 0
    """Of the fleet that live, this one among them."""
    puts: Mapping[str, int] = field(default_factory=dict)
    """Runs by how their put ended."""
    put_bytes: int = 0
    gets: Mapping[str, int] = field(default_factory=dict)
    """Runs by how their get ended: core.GET_ENDS."""
    get_bytes: int = 0
    damaged: Mapping[str, int] = field(default_factory=dict)
    """Runs whose object was not what it should be, by what was wrong with it."""
    read_bytes_per_s: int = 0
    """How fast the store gave objects in the last minute; 0: it was not read."""
    first_byte_ms: float = 0.0
    """Until an object began to come, likewise."""
    deleted_objects: int = 0
    breaker_opened: int = 0
    listed_ago_s: float = -1.0
    """Since the last listing of the whole fleet; -1: none yet."""
    epochs_ago_s: float = -1.0
    """Since the fleet's clears were listed; -1: not yet."""

    def __post_init__(self) -> None:
        _one_of("state", self.state, STATES)
        for name in ("listed_ago_s", "epochs_ago_s"):
            ago_s = getattr(self, name)
            if ago_s < 0 and ago_s != -1:
                raise _bad(f"has a {name} of {ago_s}")
        if self.first_byte_ms < 0:
            raise _bad(f"has a field 'first_byte_ms' of {self.first_byte_ms}")


@dataclass(frozen=True)
class WorkerEvent:
    """For the daemon's log."""

    event: str
    fields: Mapping[str, FieldValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.fields.keys().isdisjoint(("kind", "event")):
            raise _bad("has a field that is called as what every event has")

    def to_line(self) -> bytes:
        return _encoded({"kind": "event", "event": self.event}, self.fields)

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Raises InternalError for a line that is no event."""
        values = _decoded(line)
        if values.pop("kind", None) != "event":
            raise _bad("has no kind 'event'")
        event = _checked("event", values.pop("event", None), str)
        if len(values) > _EVENT_FIELDS_MAX:
            raise _bad(f"has {len(values)} fields; an event has {_EVENT_FIELDS_MAX} at most")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise _bad(f"has a field {name!r} that is neither text nor a number")
        return cls(event, values)


@dataclass(frozen=True)
class EpochsFound(_Line):
    """What the fleet has cleared, as the worker has listed it: all of it at first, then what has
    changed. One listing may take several lines of one number."""

    KIND: ClassVar[str] = "epochs"

    serial: int
    """Of the listing. The daemon says it back (EpochsHeard) once it has acted upon it."""
    left: int
    """Lines of this listing that follow."""
    epochs: Mapping[str, int]
    """The fleet's, of namespaces that have any, by 32 hex digits."""

    def __post_init__(self) -> None:
        _checked_epochs(self.epochs)


@dataclass(frozen=True)
class ClearWritten(_Line):
    """The store has the marker of a clear that the daemon has told of, and none was above it."""

    KIND: ClassVar[str] = "cleared"

    namespace: str
    epoch: int
    """The fleet's, from now on or until another clear."""
    clear_epoch: int
    """As it was told."""
    below: int
    """The fleet's epoch before that, 0 for none: the daemon may not have heard of it yet."""

    def __post_init__(self) -> None:
        _checked_id("namespace", self.namespace)
        _checked_epoch(self.epoch)


@dataclass(frozen=True)
class ClearTold(_Line):
    """To the worker: this namespace was cleared here; mark it in the store."""

    KIND: ClassVar[str] = "clear"

    namespace: str
    clear_epoch: int
    """Which clear: its number of this host's."""

    def __post_init__(self) -> None:
        _checked_id("namespace", self.namespace)


@dataclass(frozen=True)
class EpochsKnown(_Line):
    """To the worker: what the fleet has cleared, as this host knows from earlier. What of it the
    store does not have any more is written again."""

    KIND: ClassVar[str] = "known"

    epochs: Mapping[str, int]

    def __post_init__(self) -> None:
        _checked_epochs(self.epochs)


@dataclass(frozen=True)
class EpochsHeard(_Line):
    """To the worker: nothing is served any more that is older than the listing of this number."""

    KIND: ClassVar[str] = "heard"

    serial: int


FromWorker = WorkerReport | WorkerEvent | EpochsFound | ClearWritten
ToWorker = ClearTold | EpochsKnown | EpochsHeard


def read_line(line: bytes) -> FromWorker:
    """A line of a worker's stdout. Raises InternalError for one that is none of these."""
    kind = _kind_of(line)
    if kind == "event":
        return WorkerEvent.from_line(line)
    if kind == EpochsFound.KIND:
        return EpochsFound.from_line(line)
    return (
        ClearWritten.from_line(line) if kind == ClearWritten.KIND else WorkerReport.from_line(line)
    )


def read_told(line: bytes) -> ToWorker:
    """A line of a worker's stdin, behind the first. Raises InternalError for one that is none."""
    kind = _kind_of(line)
    if kind == EpochsKnown.KIND:
        return EpochsKnown.from_line(line)
    return EpochsHeard.from_line(line) if kind == EpochsHeard.KIND else ClearTold.from_line(line)


def _kind_of(line: bytes) -> Any:
    return _decoded(line).get("kind")


def _kinds_of_fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def _encoded(head: Mapping[str, Any], values: Mapping[str, Any]) -> bytes:
    line = json.dumps({**head, **values}, default=dict, allow_nan=False).encode() + b"\n"
    if len(line) > LINE_BYTES_MAX:
        raise _bad(f"would have {len(line)} bytes; at most {LINE_BYTES_MAX}")
    return line


def _decoded(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES_MAX:
        raise _bad(f"has more than {LINE_BYTES_MAX} bytes")
    try:
        values = json.loads(line)
    # ValueError: text of another encoding too, numbers of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise _bad("is not JSON") from error
    if not isinstance(values, dict):
        raise _bad("is no object of JSON")
    return values


def _checked(name: str, value: Any, kind: Any) -> Any:
    if kind is str or kind is bool:
        good = isinstance(value, kind)
    elif kind is float:
        good = _is_number(value, int | float) and math.isfinite(value)
    elif kind is int:
        good = _is_count(value)
    else:  # counts by name
        good = isinstance(value, dict) and all(_is_count(count) for count in value.values())
    if not good:
        raise _bad(f"has a field {name!r} that is not as it should be: {str(value)[:80]!r}")
    return float(value) if kind is float else value


def _is_count(value: Any) -> bool:
    return _is_number(value, int) and 0 <= value <= _COUNT_MAX


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _checked_id(name: str, value: str) -> None:
    if len(value) != 32 or any(digit not in "0123456789abcdef" for digit in value):
        raise _bad(f"has a {name} that is not 32 hex digits")


def _checked_epochs(epochs: Mapping[str, int]) -> None:
    for namespace, epoch in epochs.items():
        _checked_id("namespace", namespace)
        _checked_epoch(epoch)


def _checked_epoch(epoch: int) -> None:
    if epoch >= EPOCHS_END:
        raise _bad(f"has an epoch of {epoch}; they are below {EPOCHS_END}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _bad(f"has a {name} of {value[:80]!r}; it is one of {', '.join(known)}")


def _bad(problem: str) -> InternalError:
    return InternalError(
        f"a line between the daemon and its remote worker {problem}; both have to be of one "
        "version of kvwarehouse",
        code="remote_line",
    )

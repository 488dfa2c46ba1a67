"""The daemon's log: events of a closed set with fields, one line each, on stderr.

Thread-safe. Fields are numbers and short texts; never KV, token ids or secrets. Text values are
cut, so that no line grows with its input. Whoever reads the lines may stand still: what finds no
room within a second is left out, and counted.
"""

from __future__ import annotations

import json
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, Self, TextIO

from kvwarehouse.daemon.repeats import Repeats

_VALUE_CHARS: Final = 2000
_FIELDS: Final = 32
_PATIENCE_MS: Final = 1000
_PIECE_CHARS: Final = 4096  # what a pipe that has room takes at once: PIPE_BUF, of ASCII
_TERMINAL_CHARS: Final = 32  # as much, of a terminal, which has room for as little as it likes


class Level(StrEnum):
    """How much an event matters to whoever runs the daemon; docs/events.md has the meaning of each
    event."""

    INFO = "info"
    """Life: for whoever looks for the cause of something."""
    WARNING = "warning"
    """Something works worse than it was set up to, or may soon: somebody should look."""
    ERROR = "error"
    """Something was lost, or does not go on until somebody acts."""


BY_OPERATORS: Final = True


class Event(StrEnum):
    """Everything this log can say. A name is stable: programs match on it. What is done
    BY_OPERATORS is said each time, however often it comes."""

    level: Level
    by_operators: bool

    def __new__(cls, name: str, level: Level, by_operators: bool = False) -> Self:
        event = str.__new__(cls, name)
        event._value_, event.level, event.by_operators = name, level, by_operators
        return event

    STARTING = "starting", Level.INFO
    RECOVERED = "recovered", Level.INFO
    READY = "ready", Level.INFO
    DRAINING = "draining", Level.INFO, BY_OPERATORS
    UNDRAINED = "undrained", Level.INFO, BY_OPERATORS
    FLUSHED = "flushed", Level.INFO
    STOPPED = "stopped", Level.INFO
    START_WAITS = "start_waits", Level.WARNING  # for a disk
    START_REFUSED = "start_refused", Level.ERROR
    ENDED = "ended", Level.ERROR  # by what it met while it served
    IDENTITY_CREATED = "identity_created", Level.INFO
    IDENTITY_ADOPTED = "identity_adopted", Level.INFO
    IDENTITY_MENDED = "identity_mended", Level.WARNING
    IDENTITY_NOT_MENDED = "identity_not_mended", Level.WARNING
    LEDGER_REBUILT = "ledger_rebuilt", Level.WARNING
    LEDGER_DEGRADED = "ledger_degraded", Level.WARNING
    KEEPS_LOST = "keeps_lost", Level.WARNING
    RELOADED = "reloaded", Level.INFO, BY_OPERATORS
    RELOAD_FAILED = "reload_failed", Level.ERROR
    CERTIFICATE_ENDS = "certificate_ends", Level.WARNING
    CALLS_REFUSED = "calls_refused", Level.WARNING
    CONNECTIONS_NEAR_BOUND = "connections_near_bound", Level.WARNING
    VARIABLE_UNKNOWN = "variable_unknown", Level.WARNING
    HTTP_EXPOSED = "http_exposed", Level.WARNING
    ARENA_NOT_TMPFS = "arena_not_tmpfs", Level.WARNING
    ARENA_ROOM_SHORT = "arena_room_short", Level.WARNING
    NVME_ROOM_SHORT = "nvme_room_short", Level.WARNING
    PATH_REMOVED = "path_removed", Level.ERROR
    PATH_RESTORED = "path_restored", Level.WARNING
    PATH_NOT_RESTORED = "path_not_restored", Level.ERROR
    NVME_NO_ANSWER = "nvme_no_answer", Level.ERROR
    NAMESPACE_ADDED = "namespace_added", Level.INFO
    NAMESPACE_FORGOTTEN = "namespace_forgotten", Level.INFO
    NAMESPACE_UNUSABLE = "namespace_unusable", Level.WARNING
    CLEARED = "cleared", Level.INFO, BY_OPERATORS
    EVICTED = "evicted", Level.INFO, BY_OPERATORS
    RPC_FAILED = "rpc_failed", Level.ERROR
    STREAM_STALLED = "stream_stalled", Level.WARNING
    CORE_UNRESPONSIVE = "core_unresponsive", Level.ERROR
    KV_EVENTS_FAILED = "kv_events_failed", Level.ERROR
    KV_EVENTS_FOLLOW = "kv_events_follow", Level.INFO
    KV_EVENTS_LOST = "kv_events_lost", Level.WARNING
    KV_EVENTS_REPLAY_FAILED = "kv_events_replay_failed", Level.WARNING
    KV_EVENTS_WITHOUT_TOKENS = "kv_events_without_tokens", Level.WARNING
    REMOTE_WORKER_STARTED = "remote_worker_started", Level.INFO
    REMOTE_WORKER_FAILED = "remote_worker_failed", Level.ERROR
    REMOTE_WORKER_ENDED = "remote_worker_ended", Level.WARNING
    REMOTE_WORKER_HANGS = "remote_worker_hangs", Level.ERROR
    REMOTE_SERVING = "remote_serving", Level.INFO
    REMOTE_FAILING = "remote_failing", Level.WARNING
    REMOTE_REFUSED = "remote_refused", Level.ERROR
    REMOTE_FULL = "remote_full", Level.WARNING
    REMOTE_CLEARED = "remote_cleared", Level.INFO
    REMOTE_CLEARS_LOST = "remote_clears_lost", Level.ERROR
    REMOTE_CLEARS_UNSAVED = "remote_clears_unsaved", Level.ERROR
    REMOTE_STOPPED = "remote_stopped", Level.ERROR
    LOG_LINES_LOST = "log_lines_lost", Level.WARNING
    # An event of the native core, with its name in the field "name". What has no level below had
    # better be seen.
    CORE = "core", Level.WARNING


_BY_NAME: Final = {event.value: event for event in Event}

_OF_CORE: Final = {
    Level.INFO: (
        "hbm_ready",
        "nvme_healed",
        "nvme_memory_not_registered",
        "nvme_segment_removed",
    ),
    Level.WARNING: (
        "arena_limited",
        "arena_shrunk",
        "headers_mended",
        "index_small",
        "index_bound",
        "index_too_small",
        "page_damaged_unfinished",
        "page_quarantined",
        "message_refused",
        "peer_refused",
        "remote_link_dropped",
        "hbm_waiting",
        "hbm_copy_dropped",
        "nvme_read_only",
        "nvme_no_space",
        "nvme_write_failed",
        "nvme_flush_failed",
        "nvme_toc_failed",
        "nvme_open_failed",
        "nvme_remove_failed",
        "nvme_no_descriptors",
        "nvme_page_too_large",
        "nvme_bad_segment",
        "nvme_scan_cut_short",
        "nvme_records_refused",
        "nvme_foreign_segment",
        "nvme_shrunk",
        "nvme_cut_failed",
    ),
    Level.ERROR: (
        "hbm_failed",
        "memory_lost",
        "nvme_bad_header",
    ),
}

CORE_LEVELS: Final = {name: level for level, names in _OF_CORE.items() for name in names}
"""Of what the core says, by its name."""


class Log:
    """Writes events to `stream`. `form`: "json", "text", or "auto" (text on a terminal)."""

    def __init__(
        self,
        form: str = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: in seconds; it decides what comes too often."""
        self._clock = clock
        self._repeats = Repeats()
        self._stream = sys.stderr if stream is None else stream
        terminal = self._stream.isatty()
        self._json = form == "json" or (form == "auto" and not terminal)
        self._piece = _TERMINAL_CHARS if terminal else _PIECE_CHARS
        self._lock = threading.Lock()
        self._lost = 0  # lines, since one was written
        self._cut = False  # whether what was written last lacks its end

    def event(self, event: Event, **fields: object) -> None:
        """Never raises, and waits a second at most where nobody reads: a full disk under stderr, a
        closed pipe, or one whose reader stands still must not stop the daemon. What comes over and
        over is held back and counted (repeats.py), until `tell` says how much of it there was; what
        operators do is not."""
        given = dict(list(fields.items())[:_FIELDS])
        kept = {key: _plain(value) for key, value in given.items()}
        with self._lock:
            name, now_s = _full_name(event, kept), self._clock()
            if event.by_operators or self._repeats.admits(name, kept, now_s):
                self._say(event, kept)

    def tell(self, *, everything: bool = False) -> None:
        """Says what is due of the events that were held back; for whoever looks about once a
        second. everything: all of it, as before the end."""
        with self._lock:
            for name, fields in self._repeats.due(self._clock(), everything=everything):
                self._say(_BY_NAME[name.partition(" ")[0]], fields)

    def _say(self, event: Event, fields: Mapping[str, Any]) -> None:
        try:
            if self._lost and self._has_room():
                lost, self._lost = self._lost, 0
                self._write(self._line(Event.LOG_LINES_LOST, {"lines": lost}))
            self._write(self._line(event, fields))
        except (OSError, ValueError):
            pass

    def _write(self, line: str) -> None:
        text = f"\n{line}\n" if self._cut else f"{line}\n"
        for start in range(0, len(text), self._piece):
            if not self._has_room():
                self._lost += 1
                self._cut = self._cut or start > 0
                return
            self._stream.write(text[start : start + self._piece])
            self._stream.flush()
        self._cut = False

    def _has_room(self) -> bool:
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):
            return True  # no file, or a closed one, which says so itself
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return bool(poll.poll(0 if self._lost else _PATIENCE_MS))

    def core_events(self, events: Iterable[tuple[str, Mapping[str, str]]]) -> None:
        """Events drained from the native core, under one name of this set."""
        for name, fields in events:
            self.event(Event.CORE, name=name, **{_safe_key(key): fields[key] for key in fields})

    def _line(self, event: Event, fields: Mapping[str, Any]) -> str:
        now = time.time()
        stamp = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        )
        level = _level(event, fields.get("name"))
        if self._json:
            head = {"time": stamp, "level": level, "event": event.value}
            return json.dumps({**head, **fields}, ensure_ascii=True)
        shown = " ".join(f"{key}={json.dumps(value)}" for key, value in fields.items())
        return f"{stamp} {level:<7} {event.value} {shown}".rstrip()


def _full_name(event: Event, fields: Mapping[str, Any]) -> str:
    return f"{event} {fields.get('name')}" if event is Event.CORE else event.value


def _level(event: Event, name: object) -> Level:
    return CORE_LEVELS.get(str(name), event.level) if event is Event.CORE else event.level


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in list(value.items())[:_FIELDS]}
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"  # could be a key or a secret
    return str(value)[:_VALUE_CHARS]


def _safe_key(key: str) -> str:
    return f"core_{key}" if key in ("name", "event", "time", "level", "self") else key

"""Reads a trace file, or a folder of session files: finds its format, and says which line is bad.

Not thread-safe: a reader is used once. Lines and files are read up to a bound. Bad lines are
refused, or with `skip_bad` counted; the first few are kept to be shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvwarehouse.errors import UsageError
from kvwarehouse.trace.formats import (
    BLOCK_TOKENS,
    LINE_READERS,
    RECORDING,
    BadLineError,
    Clock,
    an_object,
    decoded,
    recording_block_tokens,
    session_block_tokens,
    session_requests,
)
from kvwarehouse.trace.trace import Trace, TraceBuilder, TraceRequest

FORMATS: Final = ("mooncake", "bailian", "weka", "kvwarehouse")
MOST_LINE_BYTES: Final = 256 * 1024 * 1024
_LINES_TO_DETECT = 100
_COMPLAINTS_KEPT = 5


@dataclass(frozen=True)
class ReadOptions:
    """`form` is one of FORMATS, None to find out; `block_tokens` None for what the format says.
    Sessions begin `session_gap_s` apart."""

    form: str | None = None
    block_tokens: int | None = None
    skip_bad: bool = False
    session_gap_s: float = 0.0


def read_trace(path: str | Path, options: ReadOptions | None = None) -> Trace:
    """Raises UsageError that names file, line and reason."""
    return _Reader(Path(path), options or ReadOptions()).read()


class _Reader:
    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path = path
        self._options = options
        self._builder = TraceBuilder()
        self._block_tokens = options.block_tokens
        self._skipped = 0
        self._complaints: list[str] = []
        self._sessions = 0

    def read(self) -> Trace:
        try:
            form = "weka" if self._path.is_dir() else self._options.form or self._detected()
            if form == "weka":
                self._read_sessions()
            else:
                self._read_lines(form)
        except OSError as error:
            raise UsageError(
                f"the trace {self._path} cannot be read: {error.strerror}", code="no_trace"
            ) from error
        return self._builder.build(
            str(self._path),
            form,
            self._block_tokens or BLOCK_TOKENS.get(form, 0),
            skipped=self._skipped,
            complaints=self._complaints,
        )

    # --- which format ---

    def _detected(self) -> str:
        """By the first line that is one of a trace; a file that is JSON as a whole has sessions."""
        with self._path.open("rb") as opened:
            for number, text in self._lines(opened):
                if number > _LINES_TO_DETECT:
                    break
                try:
                    form = _format_of(decoded(text))
                except BadLineError:
                    continue
                if form:
                    return form
        return "weka" if self._is_one_json() else "mooncake"

    def _is_one_json(self) -> bool:
        """Whether it begins like an object or a list over several lines."""
        with self._path.open("rb") as opened:
            begin = opened.read(4096).strip()
        return begin[:1] == b"[" or begin.split(b"\n", 1)[0].strip() == b"{"

    # --- a request on each line ---

    def _read_lines(self, form: str) -> None:
        reader, clock = LINE_READERS[form], Clock()
        with self._path.open("rb") as opened:
            for number, text in self._lines(opened):
                try:
                    line = an_object(decoded(text))
                    if form == "kvwarehouse" and RECORDING in line:
                        self._agree_on(recording_block_tokens(line))
                        continue
                    request = reader(line, self._block_tokens or BLOCK_TOKENS.get(form, 1))
                    clock.check(request.time_s)
                except BadLineError as bad:
                    self._complain(f"{self._path}:{number}", bad)
                    continue
                self._builder.add(request)
        if form == "kvwarehouse" and self._block_tokens is None:
            raise UsageError(
                f"{self._path}:1: the line that says what a recording is is missing; give"
                " --block-tokens",
                code="bad_trace",
            )

    def _lines(self, opened: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Those that are not empty, with their numbers from 1."""
        number = 0
        while text := opened.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(text) > MOST_LINE_BYTES:
                raise UsageError(
                    f"{self._path}:{number}: longer than {MOST_LINE_BYTES:,} bytes: not a trace",
                    code="bad_trace",
                )
            if text.strip():
                yield number, text

    # --- a session in each object ---

    def _read_sessions(self) -> None:
        files = [self._path]
        if self._path.is_dir():
            files = sorted(self._path.glob("*.json")) + sorted(self._path.glob("*.jsonl"))
        for file in files:
            for place, session in self._sessions_of(file):
                self._read_session(place, session)

    def _sessions_of(self, file: Path) -> Iterator[tuple[str, Any]]:
        """Of a file that is one JSON value, or one on each line."""
        with file.open("rb") as opened:
            text = opened.read(MOST_LINE_BYTES + 1)
        if len(text) > MOST_LINE_BYTES:
            yield from self._sessions_by_line(file)
            return
        try:
            value = decoded(text)
        except BadLineError:
            yield from self._sessions_by_line(file)
            return
        values = value if isinstance(value, list) else [value]
        for number, each in enumerate(values, start=1):
            yield (f"{file}: session {number}" if len(values) > 1 else str(file)), each

    def _sessions_by_line(self, file: Path) -> Iterator[tuple[str, Any]]:
        with file.open("rb") as opened:
            for number, text in self._lines(opened):
                try:
                    session = decoded(text)
                except BadLineError as bad:
                    self._complain(f"{file}:{number}", bad)
                    continue
                yield f"{file}:{number}", session

    def _read_session(self, place: str, value: Any) -> None:
        start_s = self._sessions * self._options.session_gap_s
        try:
            session = an_object(value)
            self._agree_on(session_block_tokens(session))
            self._sessions += 1
            for number, found in enumerate(
                session_requests(session, self._sessions, start_s), start=1
            ):
                if isinstance(found, TraceRequest):
                    self._builder.add(found)
                else:
                    self._complain(f"{place}: request {number}", found)
        except BadLineError as bad:
            self._complain(place, bad)

    def _agree_on(self, block_tokens: int) -> None:
        if self._block_tokens is None:
            self._block_tokens = block_tokens
        elif self._block_tokens != block_tokens:
            raise BadLineError(
                f"blocks of {block_tokens} tokens among blocks of {self._block_tokens}; replay them"
                " apart"
            )

    def _complain(self, place: str, bad: BadLineError) -> None:
        if not self._options.skip_bad:
            raise UsageError(
                f"{place}: {bad}; correct it, or pass --skip-bad to count such lines and go on",
                code="bad_trace",
            ) from bad
        self._skipped += 1
        if len(self._complaints) < _COMPLAINTS_KEPT:
            self._complaints.append(f"{place}: {bad}")


def _format_of(line: Any) -> str | None:
    if not isinstance(line, Mapping):
        return None
    if RECORDING in line:
        return "kvwarehouse"
    if "requests" in line:
        return "weka"
    if "hash_ids" in line:
        return "bailian" if "chat_id" in line else "mooncake"
    return None

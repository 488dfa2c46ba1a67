"""Reads a trace file, or a folder of session files: finds its format, and says which line is bad.

Not thread-safe: a reader is used once. A file is opened once and read from its begin to its end, so
a pipe will do. Lines and files are read up to a bound. Bad lines are refused, or with `skip_bad`
counted; the first few are kept to be shown.
"""

from __future__ import annotations

import io
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
            form = self._read_folder() if self._path.is_dir() else self._read_file()
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

    def _read_folder(self) -> str:
        """Of session files. Returns their format."""
        for file in sorted(self._path.glob("*.json")) + sorted(self._path.glob("*.jsonl")):
            with file.open("rb") as opened:
                self._read_sessions(file, _TraceFile(opened))
        return "weka"

    def _read_file(self) -> str:
        """Returns its format."""
        with self._path.open("rb") as opened:
            file = _TraceFile(opened)
            form = self._options.form or _detected(file)
            if form == "weka":
                self._read_sessions(self._path, file)
            else:
                self._read_lines(form, file)
        return form

    # --- a request on each line ---

    def _read_lines(self, form: str, file: _TraceFile) -> None:
        reader, clock = LINE_READERS[form], Clock()
        for number, text in self._lines(file):
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

    def _lines(self, file: _TraceFile) -> Iterator[tuple[int, bytes]]:
        """Those that are not empty, with their numbers from 1."""
        number = 0
        while text := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(text) > MOST_LINE_BYTES:
                raise UsageError(
                    f"{self._path}:{number}: longer than {MOST_LINE_BYTES:,} bytes: not a trace",
                    code="bad_trace",
                )
            if text.strip():
                yield number, text

    # --- a session in each object ---

    def _read_sessions(self, path: Path, file: _TraceFile) -> None:
        for place, session in self._sessions_of(path, file):
            self._read_session(place, session)

    def _sessions_of(self, path: Path, file: _TraceFile) -> Iterator[tuple[str, Any]]:
        """Of a file that is one JSON value, or one on each line."""
        text = file.read(MOST_LINE_BYTES + 1)
        try:
            value = decoded(text) if len(text) <= MOST_LINE_BYTES else None
        except BadLineError:
            value = None
        if value is None:
            file.put_back(text)
            yield from self._sessions_by_line(path, file)
            return
        values = value if isinstance(value, list) else [value]
        for number, each in enumerate(values, start=1):
            yield (f"{path}: session {number}" if len(values) > 1 else str(path)), each

    def _sessions_by_line(self, path: Path, file: _TraceFile) -> Iterator[tuple[str, Any]]:
        for number, text in self._lines(file):
            try:
                session = decoded(text)
            except BadLineError as bad:
                self._complain(f"{path}:{number}", bad)
                continue
            yield f"{path}:{number}", session

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


class _TraceFile:
    """A file or a pipe, read from its begin to its end; what was read to look at it is put back."""

    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened
        self._back = io.BytesIO()

    def readline(self, most_bytes: int) -> bytes:
        """Like that of a file: without a line break where `most_bytes` or the file end first."""
        text = self._back.readline(most_bytes)
        if text.endswith(b"\n"):
            return text
        return text + self._opened.readline(most_bytes - len(text))

    def read(self, most_bytes: int) -> bytes:
        """All there is, up to `most_bytes`."""
        text = self._back.read(most_bytes)
        return text + self._opened.read(most_bytes - len(text))

    def put_back(self, text: bytes) -> None:
        """`text` is what was read last, and will be read next."""
        self._back = io.BytesIO(text + self._back.read())


def _detected(file: _TraceFile) -> str:
    """The format, by the first line that is one of a trace; a file that is JSON as a whole has
    sessions."""
    form: str | None = None
    begin: list[bytes] = []
    size_bytes = 0
    while form is None and len(begin) < _LINES_TO_DETECT and size_bytes <= MOST_LINE_BYTES:
        text = file.readline(MOST_LINE_BYTES + 1)
        if not text:
            break
        begin.append(text)
        size_bytes += len(text)
        form = _format_of_line(text)
    file.put_back(b"".join(begin))
    return form or ("weka" if _is_one_json(b"".join(begin)) else "mooncake")


def _is_one_json(begin: bytes) -> bool:
    """Whether a file begins like an object or a list over several lines."""
    begin = begin.strip()
    return begin[:1] == b"[" or begin.split(b"\n", 1)[0].strip() == b"{"


def _format_of_line(text: bytes) -> str | None:
    try:
        line = decoded(text)
    except BadLineError:
        return None
    if not isinstance(line, Mapping):
        return None
    if RECORDING in line:
        return "kvwarehouse"
    if "requests" in line:
        return "weka"
    if "hash_ids" in line:
        return "bailian" if "chat_id" in line else "mooncake"
    return None

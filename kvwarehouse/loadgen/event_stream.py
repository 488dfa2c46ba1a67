"""Server-sent events as they come: the data of each. Stateless but for one stream.

Source: the event-stream format of the HTML standard, of which completion servers use data lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

MOST_LINE_BYTES: Final = 4 * 1024 * 1024


class MalformedError(ValueError):
    """Says what in the stream is none."""


def event_data(read: Callable[[], bytes]) -> Iterator[bytes]:
    """`read` returns what has arrived, b"" at the end. An event without its blank line at the end
    of the stream counts: some servers forget it behind their last."""
    data: list[bytes] = []
    for line in _lines(read):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data = []
    if data:
        yield b"\n".join(data)


def _lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    rest = b""
    while arrived := read():
        *whole, rest = (rest + arrived).split(b"\n")
        if len(rest) > MOST_LINE_BYTES:
            raise MalformedError(f"a line of more than {MOST_LINE_BYTES:,} bytes")
        yield from (line.removesuffix(b"\r") for line in whole)
    if rest:
        yield rest

"""Writes a trace as a recording: keyed hashes, lengths and times, nothing of what was said.

The key is drawn for each recording and kept nowhere: equal prefixes have equal names within one
recording, and names of two recordings cannot be compared. A name is 64 bits of keyed BLAKE2b over
the number that the block got when it first came: a block already stands for its whole prefix.
Stateless.
"""

from __future__ import annotations

import json
import secrets
from hashlib import blake2b
from pathlib import Path

from kvwarehouse.errors import UsageError
from kvwarehouse.trace.formats import RECORDING, RECORDING_VERSION
from kvwarehouse.trace.trace import Trace

_NAME_BYTES = 8


def write_recording(trace: Trace, path: str | Path) -> None:
    """Times start at 0. Raises UsageError where the file exists or cannot be written."""
    try:
        with Path(path).open("x", encoding="ascii") as opened:
            head = {RECORDING: RECORDING_VERSION, "block_tokens": trace.block_tokens}
            opened.write(json.dumps(head) + "\n")
            for line in _lines(trace):
                opened.write(line)
    except OSError as error:
        raise UsageError(
            f"the recording {path} cannot be written: {error.strerror}; give the path of a new"
            " file",
            code="bad_recording_path",
        ) from error


def _lines(trace: Trace) -> list[str]:
    key = secrets.token_bytes(32)
    names = [
        blake2b(block.to_bytes(8, "little"), key=key, digest_size=_NAME_BYTES).hexdigest()
        for block in range(trace.ids)
    ]
    start_s = float(trace.times_s[0])
    lines, begin = [], 0
    for at in range(trace.requests):
        end = int(trace.ends[at])
        line = {
            "t": round(float(trace.times_s[at]) - start_s, 6),
            "in": int(trace.input_tokens[at]),
            "out": int(trace.output_tokens[at]),
            "keys": [names[block] for block in trace.pages[begin:end]],
        }
        lines.append(json.dumps(line, separators=(",", ":")) + "\n")
        begin = end
    return lines

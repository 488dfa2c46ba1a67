"""A ledger with as much in it as a warehouse takes: hundreds of megabytes."""

from __future__ import annotations

import io
import json
from pathlib import Path

from kvwarehouse.daemon import ledger as module
from kvwarehouse.daemon.keeps import MAX_KEEPS, MAX_NAME_BYTES
from kvwarehouse.daemon.ledger import KeepRecord, Ledger
from kvwarehouse.daemon.logs import Log
from kvwarehouse.types import MAX_NAMESPACE_BYTES, MAX_TEXT_CHARS, Namespace

MOST_ENDS = 1 << 16  # native/warehouse/keeps.h; a prompt has 64 marks at most


def opened(directory: Path) -> Ledger:
    return Ledger([str(directory)], b"w" * 16, Log("json", io.StringIO()), expected=False)


def largest(number: int) -> Namespace:
    """With as many bytes as a warehouse takes."""
    space = Namespace(model="m0", weights="w", dtype="b", layout="l/1", page_tokens=4, page_bytes=8)
    fields = {**space.to_fields(), "salt": f"{number:04d}"}
    fields["extra"] = {f"{place:02d}": "" for place in range(12)}
    for name in fields["extra"]:
        missing = MAX_NAMESPACE_BYTES - len(json.dumps(fields))
        fields["extra"][name] = "x" * min(missing, MAX_TEXT_CHARS)
    assert len(json.dumps(fields)) == MAX_NAMESPACE_BYTES
    return Namespace.from_fields(fields)


def test_largest_namespaces_tombstones_and_keeps_up_to_their_bounds_fit_the_ledger(
    tmp_path: Path,
) -> None:
    """Incident: 180 namespaces of half a megabyte each filled it, and no clear was durable."""
    ledger = opened(tmp_path)
    ledger.bury((number.to_bytes(16), number) for number in range(module.MAX_TOMBSTONES))
    for number in range(module.MAX_NAMESPACES):
        ledger._remember(ledger.propose(largest(number)))
    marks = tuple(bytes(16) for _ in range(64))
    name = "\N{SNOWMAN}" * (MAX_NAME_BYTES // 3)
    ledger.write_keeps(
        [
            KeepRecord(number, name, b"n" * 16, 60.0, True, 1 << 62, True, marks)
            for number in range(MAX_KEEPS)
        ],
        [],
    )
    for epoch in (1, 2, 3):  # each writes all of them
        assert ledger.raise_epoch(None) == (epoch, True)
        assert ledger.health == "ok"
    ledger.close()
    again = opened(tmp_path)
    assert len(again.namespaces()) == module.MAX_NAMESPACES
    assert again.tombstone_count() == module.MAX_TOMBSTONES
    assert len(again.keeps()) == MAX_KEEPS
    assert again.raise_epoch(None) == (4, True)
    again.close()

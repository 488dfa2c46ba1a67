"""What one client has counted, where the status has the sums of all."""

from __future__ import annotations

from typing import Any

from kvwarehouse.client import Client


def counters_of(client: Client) -> dict[str, int]:
    """Of a client over shared memory: its session's own, by name."""
    path: Any = client._path
    found: dict[str, int] = path.native.counters()
    return found

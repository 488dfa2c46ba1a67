"""What an adapter did, for people: LMCache shows it in its /status.

Thread-safe.
"""

from __future__ import annotations

from kvwarehouse_connectors.core.counts import ReasonCounts


class Counts(ReasonCounts):
    """NAME_chunks of what was found, held (pinned) of these, loaded, not loaded (missed), stored,
    there already, and not stored (dropped); `missed.REASON` and `dropped.REASON` say why."""

    def __init__(self) -> None:
        super().__init__("chunks")

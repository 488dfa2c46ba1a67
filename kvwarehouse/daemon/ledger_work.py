"""What the daemon's loop has the ledger write now and then, in a thread of its own: the ledger's
disk may keep it waiting, and the loop goes on.

Used by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class LedgerWork:
    """One piece of work at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], object] | None) -> None:
        """None is nothing to do. Not while it is busy. Returns at once."""
        assert not self.is_busy, "one piece of work at a time"
        if work is not None:
            # A disk that never answers does not keep the process.
            self._thread = threading.Thread(target=work, name="ledger", daemon=True)
            self._thread.start()

    def wait(self, within_s: float) -> None:
        """Until it is done, for so long at most."""
        if self._thread is not None:
            self._thread.join(within_s)

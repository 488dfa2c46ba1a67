"""Nothing is registered with a GPU's driver any more when the process ends, also where nobody
closed its client: the driver ends then too, and a thread that still registers would call into it.

What is registered is not undone: that takes as long as registering did, and the process's end
unpins it. Thread-safe.
"""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

_STOP_S = 5.0
"""For all of them: a slab takes a part of a second, and a device that hangs must not hold up the
process's end."""

_lock = threading.Lock()
_open: WeakSet[Registering] = WeakSet()


class Registering(Protocol):
    def stop_registering(self, timeout_s: float) -> object: ...


def stop_at_exit(path: Registering) -> None:
    """Unless it is gone by then. More than once is once."""
    with _lock:
        _open.add(path)


# Behind the frameworks' own in the order of registration, and so before them at the end: whoever
# has memory on a device has imported them already. In this thread: Python starts none any more.
@atexit.register
def _stop_all() -> None:
    with _lock:
        left = list(_open)
    end = time.monotonic() + _STOP_S
    for path in left:
        with suppress(Exception):  # nobody is left to hear of it
            path.stop_registering(max(0.0, end - time.monotonic()))

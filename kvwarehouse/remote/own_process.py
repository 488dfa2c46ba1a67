"""The worker's own process: it ends with the daemon, gives way to engines, and leaves nothing of
KV behind. Each is for the process's one start, or for a thread's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h

_NICE: Final = 5
_PUT_THREADS_NICE: Final = 15


def end_with_parent() -> None:
    """SIGKILL when the thread that started this process ends. What a terminal or a service manager
    tells a whole group is for the daemon, which ends this process when it has no more use for
    it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def keep_to_itself() -> None:
    """Files are for this user alone, there are no core dumps, and others come first."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)


def take_stdout() -> int:
    """A descriptor of what was stdout, for lines alone: what a library prints goes to stderr."""
    lines = os.dup(1)
    os.dup2(2, 1)
    return lines


def give_way() -> None:
    """This thread, to the other threads and to engines. Whoever gives way further already, as under
    a niced daemon, may not take that back unless it is root."""
    which = os.PRIO_PROCESS, threading.get_native_id()
    os.setpriority(*which, max(_PUT_THREADS_NICE, os.getpriority(*which)))

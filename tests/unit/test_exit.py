"""A process whose daemon threads are in the core when it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

# While Python takes itself down, `last` gives the GIL to threads that come back from the core.
_PROGRAM = """
import threading, time
import numpy as np
from kvwarehouse import core, errors

class Last:
    def __del__(self, sleep=time.sleep):
        for _ in range(200):
            sleep(0.001)

def digest():
    data, key = np.zeros(1 << 16, np.uint8), bytes(16)
    while True:
        core.page_digest(data, key, 0)
        calls.append(1)

def refuse():
    options = core.CoreOptions()
    while True:
        try:
            core.check_options(options)
        except errors.UsageError:
            calls.append(1)

calls, last = [], Last()
for _ in range(4):
    threading.Thread(target={work}, daemon=True).start()
while len(calls) < 100:
    time.sleep(0.001)
"""


@pytest.mark.parametrize("work", ["digest", "refuse"])
def test_threads_in_the_core_do_not_abort_the_process_that_ends(work: str) -> None:
    """Incident: before 3.14 Python unwinds such threads, and a noexcept frame aborted."""
    program = _PROGRAM.replace("{work}", work)
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")

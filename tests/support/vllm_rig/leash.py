"""Runs a command as long as this process's parent lives:

    python -m vllm_rig.leash COMMAND...

An engine is several processes of one group, and vLLM's do not all notice that their starter was
killed. When it is, the whole group goes; so start this one as the leader of a group of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_WATCH_INTERVAL_S = 1.0


def main(command: list[str]) -> int:
    parent = os.getppid()
    child = subprocess.Popen(command, close_fds=False)
    while True:
        try:
            return child.wait(_WATCH_INTERVAL_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One client in a process of its own, to be stopped, continued and killed in the middle of what it
does. The test says what it does in a few lines of Python, where `client` is connected.

One owner; not thread-safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any, Self

from kvwarehouse_bench.harness.eventually import DEADLINE_S

_PROLOGUE = """
import json, os, sys
import numpy as np
import kvwarehouse as kvw
from kvwarehouse_bench.harness.pages import pages_of
address, given = sys.argv[1], json.loads(sys.argv[2])
def say(what):
    print(json.dumps(what), flush=True)
def hear():
    return json.loads(sys.stdin.readline())
client = kvw.connect(address, timeout_s=60)
"""


class ClientProcess:
    def __init__(self, address: str, program: str, **given: Any) -> None:
        """`program` follows a prologue with `client`, `given` (these keywords), say(value) and
        hear()."""
        command = [sys.executable, "-P", "-c", _PROLOGUE + program, address, json.dumps(given)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVW_")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> Any:
        """The next thing it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the client ended with {self._process.wait(DEADLINE_S)}"
        return json.loads(line)

    def tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)

    def stop(self) -> None:
        """Stands still until resume(). Returns once it does."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

"""The proxy of examples/ between two servers, as its user starts it."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.process import free_port
from vllm_rig.messages import Ask
from vllm_rig.process import Group
from vllm_rig.server import Stream

_PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "vllm_handoff_proxy.py"
_HOST = "127.0.0.1"
_START_S = 60.0


class Proxy:
    """prefill, decode: ports of this host. One owner."""

    def __init__(self, folder: Path, prefill: int, decode: int) -> None:
        self.port = free_port()
        command = [sys.executable, str(_PROGRAM), "--port", str(self.port)]
        command += [
            "--prefill",
            f"http://{_HOST}:{prefill}",
            "--decode",
            f"http://{_HOST}:{decode}",
        ]
        self.group = Group(command, folder / "proxy.log", dict(os.environ))

    def stream(self, ask: Ask) -> Stream:
        return Stream(self.port, ask)

    def __enter__(self) -> Self:
        self.group.start()
        eventually(self._healthy, "a proxy that answers", deadline_s=_START_S)
        return self

    def __exit__(self, *error: object) -> None:
        self.group.kill()

    def _healthy(self) -> bool:
        assert self.group.running, f"the proxy ended:\n{self.group.tail()}"
        try:
            with urllib.request.urlopen(f"http://{_HOST}:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

"""Ports that are given to servers of tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvwarehouse_bench.harness import process

_HOLD = (
    "from kvwarehouse_bench.harness.process import free_port;"
    " print(free_port(), flush=True); input()"
)


def test_port_is_given_to_one_process_as_long_as_it_lives() -> None:
    command = [sys.executable, "-c", _HOLD]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert not process._reserve(port)
    assert process._reserve(port)
    assert not process._reserve(port)


def test_port_is_none_that_the_kernel_gives_to_connections() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(low <= process.free_port() <= high for _ in range(100))

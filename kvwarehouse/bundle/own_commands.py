"""Runs a command of `kvwarehouse` in a process of its own, so that a disk or a driver that hangs
keeps only that one waiting. Stateless; thread-safe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence


def run(
    words: Sequence[str],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """What the command `words` says, however it ends. environment, directory: its own; None: this
    process's. Raises TimeoutError, and then the command is gone."""
    try:
        return subprocess.run(
            [sys.executable, "-P", "-m", "kvwarehouse", *words],
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"`kvwarehouse {words[0]}` did not end in {timeout_s:g} s") from error

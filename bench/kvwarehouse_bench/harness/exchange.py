"""A program that answers lines of JSON on a socket (answering.py is its side). One owner; not
thread-safe.

Every exchange has a deadline. Whatever ends it, the program's whole group ends with it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvwarehouse_bench.harness.process import Group, ProgramError

_QUIT_S = 60.0


class Exchange:
    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        folder: Path,
        name: str,
    ) -> None:
        """command: given the descriptor of the program's end of the socket. folder: for its log.
        name: in errors."""
        self._name = name
        self._mine, self._theirs = socket.socketpair()
        log = folder / f"{name.replace(' ', '-')}-{os.urandom(4).hex()}.log"
        self._group = Group(command(self._theirs.fileno()), log, dict(environment))
        self._lines = self._mine.makefile("rb")

    def start(self, deadline_s: float) -> Any:
        """What the program says first."""
        try:
            self._group.start(inherit=[self._theirs.fileno()])
        except OSError as error:
            self.end()
            raise ProgramError(f"{self._name} cannot be started: {error}") from error
        self._theirs.close()
        try:
            return self._hear(deadline_s)
        except BaseException:
            self.end()
            raise

    def call(self, do: str, deadline_s: float, **arguments: Any) -> Any:
        self._say(do, **arguments)
        return self._hear(deadline_s)

    def end(self) -> None:
        """At once. More than once is once."""
        self._group.kill()
        self._lines.close()
        self._mine.close()
        self._theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._group.running:
            self._say("quit")
            self._group.wait_ended(_QUIT_S)
        self.end()

    def _say(self, do: str, **arguments: Any) -> None:
        try:
            self._mine.sendall(json.dumps({"do": do, "with": arguments}).encode() + b"\n")
        except OSError as error:
            raise self._broken(f"{self._name} is gone ({error})") from None

    def _hear(self, deadline_s: float) -> Any:
        self._mine.settimeout(deadline_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            self.end()  # an answer that comes later would be taken for that of another question
            raise self._broken(f"{self._name} did not answer in {deadline_s:.0f} s") from None
        except OSError as error:
            raise self._broken(f"{self._name} is gone ({error})") from None
        if not line:
            raise self._broken(f"{self._name}: its process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise self._broken(answer["error"])
        return answer["what"]

    def _broken(self, what: str) -> ProgramError:
        return ProgramError(f"{what}\nthe end of its log:\n{self._group.tail()}")

"""A vLLM engine in processes of its own, as a bench drives it. One owner; not thread-safe.

    with Engine(options, environment, folder) as engine:
        answer = engine.ask([Ask(tokens)])

Every exchange has a deadline.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from vllm_bench.messages import Answer, Ask
from vllm_bench.process import EngineError, Group, wait_for

START_S = 300.0
EXCHANGE_S = 900.0
_QUIT_S = 60.0
_FORGET_S = 30.0


class Engine(Protocol):
    """What a bench needs of one, whichever way it is started."""

    def ask(self, asks: Sequence[Ask]) -> Answer:
        """All at once."""
        ...

    def forget(self, *, connector: bool = False) -> None:
        """Empties vLLM's own prefix cache; `connector`: and what the connector has in memory."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Offline:
    """options: those of vLLM's LLM."""

    def __init__(
        self, options: Mapping[str, Any], environment: Mapping[str, str], folder: Path
    ) -> None:
        self._mine, self._theirs = socket.socketpair()
        self._mine.settimeout(START_S)
        descriptor = str(self._theirs.fileno())
        command = [sys.executable, "-P", "-m", "vllm_bench.host", descriptor, json.dumps(options)]
        log = folder / f"engine-{os.urandom(4).hex()}.log"
        self._group = Group(command, log, dict(environment))
        self._lines = self._mine.makefile("rb")

    def __enter__(self) -> Self:
        self._group.start(inherit=[self._theirs.fileno()])
        self._theirs.close()
        try:
            self._hear()
        except BaseException:
            self._end()
            raise
        self._mine.settimeout(EXCHANGE_S)
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
        self._end()

    def ask(self, asks: Sequence[Ask]) -> Answer:
        return Answer(**self._call("generate", asks=[asdict(ask) for ask in asks]))

    def forget(self, *, connector: bool = False) -> None:
        if not wait_for(lambda: bool(self._call("forget", connector=connector)), _FORGET_S):
            raise EngineError(f"blocks are in use still after {_FORGET_S:.0f} s")

    def _call(self, do: str, **arguments: Any) -> Any:
        self._say(do, **arguments)
        return self._hear()

    def _say(self, do: str, **arguments: Any) -> None:
        try:
            self._mine.sendall(json.dumps({"do": do, "with": arguments}).encode() + b"\n")
        except OSError as error:
            raise self._broken(f"the engine is gone ({error})") from None

    def _hear(self) -> Any:
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise self._broken("the engine did not answer in time") from None
        if not line:
            raise self._broken("the engine's process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise self._broken(answer["error"])
        return answer["what"]

    def _broken(self, what: str) -> EngineError:
        return EngineError(f"{what}\nthe end of its log:\n{self._group.tail()}")

    def _end(self) -> None:
        self._group.kill()
        self._lines.close()
        self._mine.close()

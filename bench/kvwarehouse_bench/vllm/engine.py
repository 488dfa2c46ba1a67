"""A vLLM engine in processes of its own, as a bench drives it. One owner; not thread-safe.

    with Engine(options, environment, folder) as engine:
        answer = engine.ask([Ask(tokens)])

Every exchange has a deadline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from kvwarehouse_bench.harness.exchange import Exchange
from kvwarehouse_bench.harness.process import ProgramError, wait_for
from kvwarehouse_bench.vllm.messages import Answer, Ask

START_S = 300.0
EXCHANGE_S = 900.0
SETTLE_S = 1.2
"""After this an idle engine sleeps: its worker looks for work without sleeping for a second."""
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
        def command(descriptor: int) -> list[str]:
            what = [str(descriptor), json.dumps(options)]
            return [sys.executable, "-P", "-m", "kvwarehouse_bench.vllm.host", *what]

        self._exchange = Exchange(command, environment, folder, "the engine")

    def __enter__(self) -> Self:
        self._exchange.start(START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exchange.__exit__(kind, error, trace)

    def ask(self, asks: Sequence[Ask]) -> Answer:
        return Answer(**self._call("generate", asks=[asdict(ask) for ask in asks]))

    def forget(self, *, connector: bool = False) -> None:
        if not wait_for(lambda: bool(self._call("forget", connector=connector)), _FORGET_S):
            raise ProgramError(f"blocks are in use still after {_FORGET_S:.0f} s")

    def _call(self, do: str, **arguments: Any) -> Any:
        return self._exchange.call(do, EXCHANGE_S, **arguments)

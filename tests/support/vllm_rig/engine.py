"""A real vLLM engine in processes of its own, driven from a test.

    with Engine(options, folder) as engine:
        engine.generate([Ask(tokens)])

Every exchange has a deadline. Calls may be made from several threads; start and end have one owner.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.environment import engine_environment
from vllm_rig.messages import Answer, Ask
from vllm_rig.probe import SPOILT
from vllm_rig.process import Group, StartError

START_S = 300.0
EXCHANGE_S = 120.0
_QUIT_S = 30.0


class CallError(AssertionError):
    """The engine refused a call, died under it, or did not answer in time."""


class Call:
    """A call under way."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.number = number
        self._engine = engine
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._over: dict[str, Any] | None = None

    def hear(self, message: dict[str, Any]) -> None:
        self._heard.put(message)

    def first(self, timeout_s: float = EXCHANGE_S) -> None:
        """Returns when the first token, or the end, is there."""
        if self._over is None:
            self._next(time.monotonic() + timeout_s)

    def result(self, timeout_s: float = EXCHANGE_S) -> Any:
        end = time.monotonic() + timeout_s
        while self._over is None:
            self._next(end)
        if self._over["said"] == "error":
            raise CallError(f"{self._over['what']}\n{self._engine.group.tail()}")
        return self._over["what"]

    def answer(self, timeout_s: float = EXCHANGE_S) -> Answer:
        return Answer.of(self.result(timeout_s))

    def done(self) -> bool:
        while self._over is None and not self._heard.empty():
            self._next(time.monotonic() + EXCHANGE_S)
        return self._over is not None

    def abort(self) -> None:
        self._engine.call("abort", of=self.number).result()

    def _next(self, end: float) -> None:
        try:
            message = self._heard.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            tail = self._engine.group.tail()
            raise CallError(f"no answer to call {self.number} in time; the log:\n{tail}") from None
        if message["said"] != "first":
            self._over = message


class Engine:
    """options: those of vLLM's AsyncEngineArgs, as vllm_rig.options makes them."""

    def __init__(self, options: dict[str, Any], folder: Path) -> None:
        self.options = options
        self._socket, self._theirs = socket.socketpair()
        self._stages = options.get("pipeline_parallel_size", 1)
        ranks = options.get("tensor_parallel_size", 1) * self._stages
        environment = engine_environment(folder, ranks)
        descriptor = str(self._theirs.fileno())
        command = [sys.executable, "-P", "-m", "vllm_rig.host", descriptor, json.dumps(options)]
        self.group = Group(command, folder / f"engine-{os.urandom(4).hex()}.log", environment)
        self.started_in_s = 0.0
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._lost = False
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)

    # --- life

    def start(self, timeout_s: float = START_S) -> None:
        """Returns when it takes requests. StartError with the end of its log when it refuses."""
        begin = time.monotonic()
        ready = self._calls[0] = Call(self, 0)
        self.group.start(inherit=[self._theirs.fileno()])
        self._theirs.close()
        self._reader.start()
        try:
            ready.result(timeout_s)
        except BaseException as error:
            self.kill()
            if isinstance(error, CallError):
                raise StartError(str(error), self.group.text()) from None
            raise
        if self._stages > 1:
            self.probe("rig_take_stages")
        self.started_in_s = time.monotonic() - begin

    @property
    def alive(self) -> bool:
        return self.group.running and not self._lost

    def stop(self) -> None:
        """As a user's program ends it: the connector's shutdown runs. SIGKILL after a while."""
        if self.alive:
            self._send(-1, "quit", {})
            self.group.wait_ended(_QUIT_S)
        self.kill()

    def kill(self) -> None:
        self.group.kill()
        self._socket.close()
        if self._reader.ident is not None:
            self._reader.join(EXCHANGE_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # --- calls

    def call(self, do: str, **arguments: Any) -> Call:
        with self._lock:
            call = Call(self, max(self._calls) + 1)
            self._calls[call.number] = call
        self._send(call.number, do, arguments)
        return call

    def begin(self, ask: Ask) -> Call:
        return self.call("generate", **asdict(ask))

    def generate(self, asks: Sequence[Ask], timeout_s: float = EXCHANGE_S) -> list[Answer]:
        """All at once; answers in the order of `asks`."""
        calls = [self.begin(ask) for ask in asks]
        return [call.answer(timeout_s) for call in calls]

    def ask(self, ask: Ask, timeout_s: float = EXCHANGE_S) -> Answer:
        return self.begin(ask).answer(timeout_s)

    def forget(self, *, connector: bool = False) -> None:
        """Empties vLLM's own prefix cache; `connector`: and what the connector has. Waits until no
        block is in use; their bytes are spoilt then."""
        eventually(
            lambda: self.call("forget", connector=connector).result(),
            "an engine without blocks in use",
        )
        self.probe("rig_fill_all", SPOILT)

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self.call("metrics").result()
        return found

    def probe(self, method: str, *arguments: Any) -> list[Any]:
        """See vllm_rig/probe.py."""
        found: list[Any] = self.call("probe", method=method, arguments=list(arguments)).result()
        return found

    def _send(self, number: int, do: str, arguments: dict[str, Any]) -> None:
        line = json.dumps({"call": number, "do": do, "with": arguments}).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError as error:
            raise CallError(f"the engine is gone ({error}):\n{self.group.tail()}") from None

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    message = json.loads(line)
                    self._calls[message["call"]].hear(message)
            except OSError:
                pass  # closed by kill()
        self._lost = True
        with self._lock:
            for call in self._calls.values():
                call.hear({"said": "error", "what": "the engine's process ended"})

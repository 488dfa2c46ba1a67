"""`vllm serve`, driven over HTTP as a client does. One owner; not thread-safe."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvwarehouse_bench.harness.process import Group, ProgramError, free_port, wait_for
from kvwarehouse_bench.vllm.engine import EXCHANGE_S, START_S
from kvwarehouse_bench.vllm.messages import Ask, EngineReply, difference, summed

_HOST = "127.0.0.1"
_QUIT_S = 60.0


class VllmServing:
    """options: those of Offline."""

    def __init__(
        self, options: Mapping[str, Any], environment: Mapping[str, str], folder: Path
    ) -> None:
        self._port = free_port()
        program = str(Path(sys.executable).with_name("vllm"))
        command = [program, "serve", *_flags(options), "--host", _HOST, "--port", str(self._port)]
        log = folder / f"server-{os.urandom(4).hex()}.log"
        self._group = Group([*command, "--served-model-name", "it"], log, dict(environment))

    def __enter__(self) -> Self:
        self._group.start()
        if not wait_for(lambda: self._healthy() or not self._group.running, START_S) or (
            not self._group.running
        ):
            tail = self._group.tail()
            self._group.kill()
            raise ProgramError(f"vllm serve did not come up; the end of its log:\n{tail}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._group.interrupt()
            self._group.wait_ended(_QUIT_S)
        self._group.kill()

    def ask(self, asks: Sequence[Ask]) -> EngineReply:
        """One at a time only: the time to the first token of a stream."""
        if len(asks) != 1:
            raise ValueError(f"{len(asks)} asks at once; give one")
        before = self._counts()
        body = {
            "model": "it",
            "prompt": list(asks[0].tokens),
            "max_tokens": asks[0].max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            **({"kv_transfer_params": dict(asks[0].params)} if asks[0].params else {}),
        }
        seconds = self._stream(json.dumps(body))
        return EngineReply(seconds, [seconds], difference(self._counts(), before))

    def forget(self, *, connector: bool = False) -> None:
        """The server answers the same whether or not blocks were in use: nothing runs here then."""
        path = "/reset_prefix_cache" + ("?reset_external=true" if connector else "")
        time.sleep(0.05)  # the request before ends in the engine after its client has read it
        self._request("POST", path)

    def _stream(self, body: str) -> float:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=EXCHANGE_S)
        try:
            begin = time.perf_counter()
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise ProgramError(f"vllm serve: {answer.status}: {answer.read().decode()}")
            seconds = 0.0
            for line in answer:
                if not seconds and line.startswith(b"data: ") and b'"choices"' in line:
                    seconds = time.perf_counter() - begin
            return seconds
        finally:
            connection.close()

    def _counts(self) -> dict[str, float]:
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self._request("GET", "/metrics"))
        samples = [sample for family in families for sample in family.samples]
        return summed((sample.name, sample.labels, sample.value) for sample in samples)

    def _request(self, method: str, path: str) -> str:
        request = urllib.request.Request(f"http://{_HOST}:{self._port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=EXCHANGE_S) as answer:
            return str(answer.read().decode())

    def _healthy(self) -> bool:
        try:
            self._request("GET", "/health")
        except (OSError, urllib.error.URLError):
            return False
        return True


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Options of LLM as the command line has them."""
    flags = [str(options["model"])]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags += [flag] if value else []
        elif name != "model":
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags

"""`vllm serve` with streaming clients, some of whom hang up."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.process import free_port
from vllm_rig.engine import EXCHANGE_S, START_S
from vllm_rig.environment import engine_environment
from vllm_rig.messages import Ask
from vllm_rig.probe import SPOILT
from vllm_rig.process import Group, StartError

_HOST = "127.0.0.1"
_QUIT_S = 30.0
# Written one way for the command line and another for AsyncEngineArgs.
_SWITCHES = ("enforce_eager", "enable_lora")


class Server:
    """options: those of Engine."""

    def __init__(self, options: dict[str, Any], folder: Path) -> None:
        self.options = options
        self.port = free_port()
        environment = engine_environment(folder, options.get("tensor_parallel_size", 1))
        program = str(Path(sys.executable).with_name("vllm"))
        command = [program, "serve", *_flags(options), "--host", _HOST, "--port", str(self.port)]
        command += ["--served-model-name", "served", "--enable-prompt-tokens-details"]
        self.group = Group(command, folder / f"server-{os.urandom(4).hex()}.log", environment)
        self.started_in_s = 0.0

    def start(self, timeout_s: float = START_S) -> None:
        begin = time.monotonic()
        self.group.start()
        try:
            eventually(self._ready, "a server that answers", deadline_s=timeout_s)
            self.started_in_s = time.monotonic() - begin
        except AssertionError as error:
            text = f"{error}; its log ends with:\n{self.group.tail()}"
            raise StartError(text, self.group.text()) from None
        finally:
            if not self.started_in_s:
                self.kill()

    @property
    def alive(self) -> bool:
        return self.group.running and self._healthy()

    def stop(self) -> None:
        if self.group.running:
            self.group.interrupt()
            self.group.wait_ended(_QUIT_S)
        self.kill()

    def kill(self) -> None:
        self.group.kill()

    # --- requests

    def stream(self, ask: Ask) -> Stream:
        return Stream(self.port, ask)

    def forget(self) -> None:
        """Empties vLLM's own prefix cache, once no block is in use, and spoils their bytes."""
        eventually(
            lambda: json.loads(self._request("POST", "/reset_prefix_cache"))["success"],
            "a server without blocks in use",
        )
        fill = {"method": "rig_fill_all", "args": [str(SPOILT)]}
        self._request("POST", "/collective_rpc", json.dumps(fill))

    def metrics(self) -> dict[str, float]:
        """Sums over labels."""
        found: dict[str, float] = {}
        for line in self._request("GET", "/metrics").splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0]
                found[name] = found.get(name, 0) + float(value)
        return found

    def _request(self, method: str, path: str, body: str = "") -> str:
        url, headers = f"http://{_HOST}:{self.port}{path}", {"Content-Type": "application/json"}
        data = body.encode() if body else None
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=EXCHANGE_S) as answer:
            return str(answer.read().decode())

    def _healthy(self) -> bool:
        try:
            self._request("GET", "/health")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def _ready(self) -> bool:
        assert self.group.running, "the server ended"
        return self._healthy()


class Stream:
    """A completion under way; iterate for the tokens as they come."""

    def __init__(self, port: int, ask: Ask) -> None:
        body: dict[str, Any] = {
            "model": "served",
            "prompt": ask.tokens,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if ask.kv:
            body["kv_transfer_params"] = ask.kv
        if ask.salt is not None:
            body["cache_salt"] = ask.salt
        self.tokens: list[int] = []
        self.id = ""
        self.cached = 0
        self.finish = ""
        self._connection = http.client.HTTPConnection(_HOST, port, timeout=EXCHANGE_S)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def __iter__(self) -> Iterator[int]:
        answer = self._connection.getresponse()
        if answer.status != http.client.OK:
            raise AssertionError(f"{answer.status}: {answer.read().decode()}")
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            self.id = event.get("id") or self.id
            if event.get("usage"):
                details = event["usage"].get("prompt_tokens_details") or {}
                self.cached = details.get("cached_tokens") or 0
            for choice in event["choices"]:
                self.finish = choice.get("finish_reason") or self.finish
                for token in choice.get("token_ids") or []:
                    self.tokens.append(token)
                    yield token
        self.hang_up()

    def read(self) -> Stream:
        """To the end."""
        for _ in self:
            pass
        return self

    def hang_up(self) -> None:
        """At once, whatever is on its way."""
        if self._connection.sock is not None:
            self._connection.sock.close()
        self._connection.close()


def _flags(options: dict[str, Any]) -> list[str]:
    flags = [str(options["model"])]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _SWITCHES:
            flags += [flag] if value else []
        elif name != "model":
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags

"""The real KV indexer of Dynamo, as a process: it listens on all addresses and cannot be told
otherwise, so it runs only in a network namespace of its own (make test-dynamo)."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.process import free_port

_PYTHON = Path(os.environ.get("KVW_TEST_DYNAMO_PYTHON", ".venv-dynamo/bin/python"))
_ANSWER_S = 20.0


class Indexer:
    def __init__(self, port: int, log: Path) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [_PYTHON, "-m", "dynamo.indexer", "--port", str(port)],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        eventually(self._answers, f"the indexer answers; its log is {log}")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.said()[-2000:]
        try:
            self._call("/workers")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def register(self, instance: int, endpoint: str, block_size: int, replay: str = "") -> None:
        self._call(
            "/register",
            {
                "instance_id": instance,
                "endpoint": endpoint,
                "model_name": "m",
                "block_size": block_size,
                **({"replay_endpoint": replay} if replay else {}),
            },
        )

    def held(self, tokens: Any, instance: int = 7) -> tuple[int, int, int]:
        """Tokens of the longest prefix that an instance has, and how far its host memory and its
        disk each reach."""
        found = self._call("/query", {"token_ids": [int(t) for t in tokens], "model_name": "m"})
        of = found["instances"].get(str(instance), {})
        return of.get("longest_matched", 0), of.get("cpu", 0), of.get("disk", 0)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(_ANSWER_S)

    def _call(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self._base + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return json.loads(answer.read() or b"null")


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    if not _PYTHON.exists():
        pytest.skip(f"{_PYTHON} is not there: make setup-dynamo installs Dynamo's runtime")
    if os.environ.get("KVW_TEST_OWN_NETWORK") != "1":
        pytest.skip(
            "Dynamo's indexer listens on all addresses, and this process is in no network namespace"
            " of its own: run make test-dynamo where the kernel permits one"
        )
    indexer = Indexer(free_port(), tmp_path / "indexer.log")
    try:
        yield indexer
    finally:
        indexer.end()

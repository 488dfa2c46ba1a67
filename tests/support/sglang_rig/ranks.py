"""Tensor-parallel ranks, each a process with SGLang's controller; the test is their scheduler."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from kvwarehouse_bench.harness.eventually import DEADLINE_S

_PROGRAM = Path(__file__).with_name("rank_process.py")


class Ranks:
    """shape: of each rank's pool, as keywords of Shape. folder: empty, of these ranks alone."""

    def __init__(
        self, folder: Path, count: int, shape: dict[str, Any], extra: dict[str, Any]
    ) -> None:
        self._processes = [self._start(folder, rank, count, shape, extra) for rank in range(count)]
        self._threads = ThreadPoolExecutor(count)
        try:
            assert [self._heard(rank) for rank in range(count)] == [{"ready": True}] * count
        except BaseException:
            self.close()
            raise

    def all(self, **order: Any) -> list[dict[str, Any]]:
        """What every rank answers to the same order: they wait for each other."""
        return self.each(*[order] * len(self._processes))

    def each(self, *orders: dict[str, Any]) -> list[dict[str, Any]]:
        """One order a rank."""
        for process, order in zip(self._processes, orders, strict=True):
            assert process.stdin is not None
            print(json.dumps(order), file=process.stdin, flush=True)
        return [self._heard(rank) for rank in range(len(self._processes))]

    def one(self, rank: int, **order: Any) -> dict[str, Any]:
        process = self._processes[rank]
        assert process.stdin is not None
        print(json.dumps(order), file=process.stdin, flush=True)
        return self._heard(rank)

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(DEADLINE_S)
            assert process.stdout is not None
            process.stdout.close()
        self._threads.shutdown()

    def _start(
        self, folder: Path, rank: int, count: int, shape: dict[str, Any], extra: dict[str, Any]
    ) -> subprocess.Popen[str]:
        given = {
            "rendezvous": str(folder / "rendezvous"),
            "tp_rank": rank,
            "tp_size": count,
            "shape": shape,
            "extra": extra,
        }
        return subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"rank{rank}.log").open("w"),
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )

    def _heard(self, rank: int) -> dict[str, Any]:
        process = self._processes[rank]
        assert process.stdout is not None
        while True:
            line = self._threads.submit(process.stdout.readline).result(2 * DEADLINE_S)
            assert line, f"rank {rank} ended with {process.wait(DEADLINE_S)}"
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

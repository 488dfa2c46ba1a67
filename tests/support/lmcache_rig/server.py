"""LMCache's server as a process, started as a user starts it, and an engine's side of it by the
client of LMCache's own `bench server`: KV tensors in shared memory, of which the server copies.

All on loopback. One owner each; not thread-safe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.process import free_port
from lmcache_rig.spec import l2_adapter

CHUNK = 16
_BLOCKS = 64
_TAIL_BYTES = 3000
_SHAPE = f"(2,{_BLOCKS},{CHUNK},2,64):float16:3"


class LMCacheServer:
    """Raises AssertionError with what it said last where it does not serve."""

    def __init__(self, address: str, log: Path, **settings: Any) -> None:
        self.log = log
        self.rpc, self.http = free_port(), free_port()
        command = [
            str(Path(sys.executable).with_name("lmcache")),
            "server",
            *("--host", "127.0.0.1", "--port", str(self.rpc)),
            *("--http-host", "127.0.0.1", "--http-port", str(self.http)),
            *("--l1-size-gb", "0.25", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--disable-observability", "--chunk-size", str(CHUNK)),
            *("--l2-adapter", l2_adapter(address, **settings)),
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVW_")}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
            )
        try:
            eventually(lambda: self.ended() or self._serves(), "LMCache's server", deadline_s=120)
            assert not self.ended(), f"LMCache's server ended: {self.tail()}"
        except BaseException:
            self.kill()
            raise

    def ended(self) -> bool:
        return self._process.poll() is not None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.http}{path}", timeout=DEADLINE_S
        ) as answer:
            return json.load(answer)

    def l2(self) -> dict[str, Any]:
        """What its /status says of the connector."""
        status: dict[str, Any] = _first(self.get("/status"), "l2_adapters")[0]
        return status

    def stored(self) -> int:
        totals: dict[str, int] = self.l2()["totals"]
        return totals.get("stored_chunks", 0) + totals.get("already_chunks", 0)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def end(self) -> int:
        """SIGTERM; its exit status."""
        if not self.ended():
            self._process.terminate()
        return self._process.wait(DEADLINE_S)

    def tail(self) -> str:
        return self.log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")

    def _serves(self) -> bool:
        try:
            healthy: bool = self.get("/healthcheck")["status"] == "healthy"
        except OSError:
            return False
        return healthy


class Client:
    """A worker of an engine whose KV cache has 64 blocks of 16 tokens, three layers. Block 0 holds
    nothing, as in vLLM."""

    def __init__(self, server: LMCacheServer) -> None:
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        config = BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{server.rpc}",
            http_url=f"http://127.0.0.1:{server.http}",
            mode="cpu",
            transfer_mode="lmcache_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=_BLOCKS * CHUNK,
            kvcache_shape_spec=_SHAPE,
            num_blocks=_BLOCKS,
            block_size=CHUNK,
        )
        self._client = ServerBenchClient(config, lambda text: None)
        self._client.start()
        self._requests = 0

    @property
    def layers(self) -> list[torch.Tensor]:
        return list(self._client._workers[0].kv_caches.values())

    def content(self, first: int, blocks: int) -> bytes:
        """Of all layers: keys and values of those blocks."""
        return b"".join(
            layer[:, first : first + blocks].contiguous().numpy().tobytes() for layer in self.layers
        )

    def fill(self, first: int, blocks: int, seed: int) -> bytes:
        generator = np.random.default_rng(seed)
        for layer in self.layers:
            part = layer[:, first : first + blocks]
            noise = generator.integers(-1000, 1000, tuple(part.shape)).astype(np.float16)
            part.copy_(torch.from_numpy(noise))
        return self.content(first, blocks)

    def wipe(self, first: int, blocks: int) -> None:
        for layer in self.layers:
            layer[:, first : first + blocks].zero_()

    def store(self, tokens: tuple[int, ...], first: int) -> bool:
        request = self._request(tokens, first)
        done = self._client.store(request, 0, request.num_full_tokens)
        self._client.end_session(request)
        return bool(done.succeeded)

    def retrieve(self, tokens: tuple[int, ...], first: int) -> int:
        """Lookup, then retrieve of as much as was found: chunks."""
        request = self._request(tokens, first)
        found = self._client.lookup(request)
        assert found.succeeded, found
        if found.hit_chunks:
            done = self._client.retrieve(request, 0, found.hit_chunks * CHUNK)
            assert done.succeeded, done
        self._client.end_session(request)
        return int(found.hit_chunks)

    def forget(self) -> None:
        """Empties the server's L1."""
        self._client._req_client.clear(True).result(timeout=DEADLINE_S)

    def close(self) -> None:
        self._client.close()

    def _request(self, tokens: tuple[int, ...], first: int) -> Any:
        from lmcache.cli.commands.bench.server_bench.client import RequestContext

        self._requests += 1
        full = len(tokens) // CHUNK * CHUNK
        return RequestContext(
            sequence_id=0,
            request_id=f"request-{id(self)}-{self._requests}",
            request_kind="test",
            token_ids=tokens,
            num_full_tokens=full,
            total_chunks=full // CHUNK,
            chunk_size=CHUNK,
            block_offset=first,
            num_blocks=full // CHUNK,
        )


def prompt(seed: int, chunks: int, more: int = 0) -> tuple[int, ...]:
    """Whole chunks, and some tokens that are none."""
    drawn = np.random.default_rng(seed).integers(0, 50_000, chunks * CHUNK + more)
    return tuple(int(token) for token in drawn)


def _first(status: Any, name: str) -> Any:
    """The value of that name, wherever in the nested status it stands."""
    if isinstance(status, dict):
        if name in status:
            return status[name]
        status = list(status.values())
    for one in status if isinstance(status, list) else ():
        found = _first(one, name)
        if found is not None:
            return found
    return None

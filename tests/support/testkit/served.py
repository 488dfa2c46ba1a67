"""A daemon in this process, over a FakeEngine unless told otherwise: the real service, servers,
ledger and probes, in a directory of the test. A restart over the real engine needs a process, as
kvwarehouse.embedded makes them: the engine holds its directory until it is garbage.

    with Served(tmp_path, streams=2) as served:
        served.stub.Status(...)

One owner; the stub and the channel are thread-safe.
"""

from __future__ import annotations

import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import grpc

from kvwarehouse import config, wire
from kvwarehouse.daemon.lifecycle import Daemon
from kvwarehouse.daemon.logs import Log
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from testkit.fake_engine import FakeCore, FakeEngine


class Served:
    def __init__(self, directory: Path, *, engine: Any = None, **settings: Any) -> None:
        """`settings`: flags by their keys; the directories, small DRAM and a free HTTP port are
        given. The directory stays, so that a second Served on it is a restart. `engine`: in place
        of the model, kvwarehouse.core itself."""
        self.settings: dict[str, Any] = {
            "socket": str(directory / "run" / "kvw.sock"),
            "arena_dir": str(directory / "arena"),
            "dram": "16MiB",
            "http": "127.0.0.1:0",
            **settings,
        }
        self.config = config.load(self.settings, {})
        self.engine: FakeEngine = engine or FakeEngine()
        self.log = io.StringIO()
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._daemon = Daemon(self.config, Log("json", self.log), self.engine)
        self._thread = threading.Thread(target=self._run, name="served")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when it serves; raises what it refused to start with."""
        self._thread.start()
        if not self._ready.wait(DEADLINE_S):
            raise AssertionError("the daemon neither serves nor fails")
        if self.failure is not None:
            self._thread.join()
            raise self.failure
        self.channel = self.connect()
        self.stub = wire.WarehouseStub(self.channel)  # type: ignore[no-untyped-call, unused-ignore]

    def request_stop(self) -> None:
        self._daemon.request_stop()

    def request_reload(self) -> None:
        self._daemon.request_reload()

    def stop(self) -> None:
        """Drains and waits for the end. More than once is once."""
        if self._thread.ident is None:
            return
        self._daemon.request_stop()
        if hasattr(self, "channel"):
            self.channel.close()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the daemon did not end"

    @property
    def core(self) -> FakeCore:
        assert self.engine.core is not None
        return self.engine.core

    def connect(self) -> grpc.Channel:
        """A channel of its own to the Unix socket."""
        options = [*wire.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        return grpc.insecure_channel(f"unix:{self.config.grpc_socket}", options=options)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP request."""
        address = self.events("ready")[0]["http"]
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode("utf-8")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8")

    def events(self, name: str) -> list[Mapping[str, Any]]:
        """What the log says so far under `name`."""
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == name]

    def _run(self) -> None:
        try:
            self._daemon.run(self._ready.set)
        except BaseException as error:  # noqa: BLE001  the thread's edge; start() raises it
            self.failure = error
        finally:
            self._ended.set()
            self._ready.set()

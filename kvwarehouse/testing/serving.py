"""A daemon in this process over the model of the core: real service, real gRPC, no native build."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvwarehouse.config import load
from kvwarehouse.daemon.lifecycle import Daemon
from kvwarehouse.daemon.logs import Log
from kvwarehouse.testing.fake_engine import FakeEngine

_WAIT_S = 60


@contextmanager
def model_serving(folder: Path, engine: FakeEngine | None = None) -> Iterator[str]:
    """Serves from `folder`, which stays; yields the address. Ends in an orderly drain."""
    settings = {"socket": str(folder / "kvw.sock"), "arena_dir": str(folder / "arena")}
    config = load({**settings, "dram": "64MiB", "http": "off", "log_format": "json"}, environ={})
    daemon = Daemon(config, Log("json"), engine or FakeEngine())
    ready = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            daemon.run(ready.set)
        except BaseException as error:  # noqa: BLE001 - the thread's edge; raised below
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="model-daemon")
    thread.start()
    try:
        if not ready.wait(_WAIT_S):
            raise TimeoutError(f"the model daemon is not ready in {_WAIT_S} s")
        if failures:
            raise failures[0]
        yield f"unix://{config.socket}"
    finally:
        daemon.request_stop()
        thread.join(_WAIT_S)

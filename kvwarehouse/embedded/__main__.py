"""The private daemon's own process. It serves as `kvwarehouse serve` does, tells its parent through
a pipe that it is ready or why it is not, and ends when its parent does.

Not for use by hand: the one argument is what kvwarehouse/embedded/private.py passes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from kvwarehouse import config, daemon
from kvwarehouse.embedded.folder import hold
from kvwarehouse.errors import WarehouseError

_WATCH_INTERVAL_S = 1.0


def main(argument: str) -> int:
    options: dict[str, Any] = json.loads(argument)
    answer: int = options["answer"]
    lock = Path(options["lock"])
    hold(lock)
    orphaned = _watch(options["parent"])
    try:
        settings = config.load({"config": options["config"]}, environ={})
        status = daemon.serve(settings, on_ready=lambda: _tell(answer, b"ready"))
    except WarehouseError as error:
        told = {"kind": error.kind, "code": error.code, "message": error.message}
        _tell(answer, json.dumps(told).encode())
        return 1
    if orphaned.is_set():
        shutil.rmtree(lock.parent, ignore_errors=True)
    return status


def _tell(answer: int, what: bytes) -> None:
    try:
        os.write(answer, what)
        os.close(answer)
    except OSError:
        pass  # the parent is gone; the watch ends this process


def _watch(parent: int) -> threading.Event:
    """Asks for an orderly end once `parent` is not this process's parent any more. Asked by
    polling, because PR_SET_PDEATHSIG fires when the parent's *thread* ends, and a pipe is held open
    by children that the parent forked."""
    orphaned = threading.Event()

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == parent:
            never.wait(_WATCH_INTERVAL_S)
        orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="kvw-parent-watch", daemon=True).start()
    return orphaned


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

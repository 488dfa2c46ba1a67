"""A private daemon whose remote tier is alone in its fleet, and its worker:

    python -m kvwarehouse_bench.harness.lone_host daemon OPTIONS
    python -m kvwarehouse_bench.harness.lone_host worker

A host puts nothing before all others of its fleet have seen it, two minutes from its start. Where
nobody else has the fleet's secret there is nobody to wait for: here it says every second that it
lives, and puts after three. All else is as in a daemon that is served.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from kvwarehouse.daemon import remote_process
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse.embedded.__main__ import main as serve
from kvwarehouse.remote import nodes, worker

_MODULE: Final = "kvwarehouse_bench.harness.lone_host"
_BEAT_S: Final = 0.05
"""Less than a worker's round, so that each is one."""

WORKER: Final = (sys.executable, "-P", "-m", _MODULE, "worker")


class LoneDaemon(PrivateDaemon):
    """Of a fleet whose secret was made for it."""

    def _command(self, options: str) -> list[str]:
        return [sys.executable, "-P", "-m", _MODULE, "daemon", options]


def main(role: str, *options: str) -> Any:
    if role == "worker":
        nodes.__dict__["BEAT_S"] = _BEAT_S
        return worker.main()
    remote_process.COMMAND = WORKER
    return serve(*options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

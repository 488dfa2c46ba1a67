"""A daemon whose remote tier has a fleet's patience in parts of a second.

    python quick_remote.py serve FLAGS

A host puts nothing before all others have seen it, two minutes from its start: here it is seen at
once. QuickServing is Serving with it; KVW_TEST_SILENT_LOOKS is how many looks a worker may be
silent for.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from kvwarehouse import cli
from kvwarehouse.daemon import remote_process, remote_tier
from kvwarehouse_bench.harness.lone_host import WORKER
from kvwarehouse_bench.harness.serving import Serving


class QuickServing(Serving):
    def command(self) -> list[str]:
        program, *_, serve = super().command()[:5]
        return [program, "-P", __file__, serve, *super().command()[5:]]


def main(role: str, *flags: str) -> Any:
    remote_process.COMMAND = WORKER
    looks = os.environ.get("KVW_TEST_SILENT_LOOKS")
    if looks:
        remote_tier.SILENT_LOOKS = int(looks)
    return cli.main([role, *flags])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

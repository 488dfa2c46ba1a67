"""A daemon whose remote tier has a fleet's patience in parts of a second, and whose store says that
it is another time of day.

    python quick_remote.py serve FLAGS
    python quick_remote.py worker AHEAD_S

A host puts nothing before all others have seen it, two minutes from its start: here it is seen at
once. QuickServing is Serving with it; KVW_TEST_SILENT_LOOKS is how many looks a worker may be
silent for. The store's clock is ahead of this host's by KVW_TEST_STORE_AHEAD_S: it is noon as the
tests begin, so that its day ends where a test wants it, and nowhere else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from kvwarehouse import cli
from kvwarehouse.daemon import remote_process, remote_tier
from kvwarehouse.remote.object_store import ObjectStore, StoredObject
from kvwarehouse_bench.harness import lone_host
from kvwarehouse_bench.harness.serving import Serving

_DAY_S: Final = 86_400
_BEGIN_S: Final = time.time()
_NOON_S: Final = _DAY_S / 2 - _BEGIN_S % _DAY_S  # from then

STORE_DAY: Final = int(_BEGIN_S) // _DAY_S  # days since 1970, by the store's clock too


class QuickServing(Serving):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.environment["KVW_TEST_STORE_AHEAD_S"] = str(_NOON_S)

    def command(self) -> list[str]:
        program, *_, serve = super().command()[:5]
        return [program, "-P", __file__, serve, *super().command()[5:]]


def ahead_of_midnight_s(left_s: float) -> float:
    """By how much a store is ahead whose day, the one in which the tests began, ends then."""
    return _BEGIN_S + _NOON_S + _DAY_S / 2 - left_s - time.time()


def main(role: str, *options: str) -> Any:
    if role == "worker":
        _set_clock(float(options[0]))
        return lone_host.main("worker")
    ahead_s = os.environ["KVW_TEST_STORE_AHEAD_S"]
    remote_process.COMMAND = (sys.executable, "-P", __file__, "worker", ahead_s)
    looks = os.environ.get("KVW_TEST_SILENT_LOOKS")
    if looks:
        remote_tier.SILENT_LOOKS = int(looks)
    return cli.main([role, *options])


def _set_clock(ahead_s: float) -> None:
    """A store's clock is what it says of its objects."""
    list_them = ObjectStore.list

    def ahead(store: ObjectStore, prefix: str, after: str = "") -> Iterator[StoredObject]:
        for found in list_them(store, prefix, after):
            yield replace(found, modified_s=found.modified_s + ahead_s)

    ObjectStore.list = ahead  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""A private daemon for scripts and tests: started on entry, gone on exit, or with its parent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvwarehouse.embedded.private import PrivateDaemon

if TYPE_CHECKING:
    from kvwarehouse.client import Client
    from kvwarehouse.client.session import Verify

__all__ = ["PrivateDaemon", "embedded"]


@contextmanager
def embedded(
    dram: str | int = "1GiB",
    nvme_dir: str | os.PathLike[str] | None = None,
    *,
    nvme_capacity: str | int = "4GiB",
    verify: Verify = "always",
    **settings: str | int | float,
) -> Iterator[Client]:
    """A client of a daemon of its own, in a temporary directory.

    dram: the DRAM tier, taken at the start. nvme_dir: a directory for the NVMe tier, bounded by
    nvme_capacity; it is kept, and the next embedded daemon on it finds its pages. settings: any
    other setting of `kvwarehouse serve`, by its name in the configuration file. The environment's
    KVW_* do not apply.

    Blocks until the daemon serves. It ends with the block, and also when this process is killed.
    A forked child that leaves the block ends only its copy of the client.
    Raises what `kvwarehouse serve` would refuse, and TransportError when it does not come up."""
    from kvwarehouse.client import connect

    settings = {"dram": dram, **settings}
    if nvme_dir is not None:
        settings |= {"nvme_dir": os.fspath(nvme_dir), "nvme_capacity": nvme_capacity}
    with PrivateDaemon(settings) as daemon, connect(daemon.address, verify=verify) as client:
        yield client

"""A daemon for each file of tests, and rigs on the contract model of CUDA's driver."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from pinned_parts.rig import Make, Rig
from testkit.cuda_model import ModelDevice


@pytest.fixture(scope="module")
def serving(cuda_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("disk"), dram="128MiB") as serving:
        yield serving


@pytest.fixture
def connection(serving: Serving) -> Iterator[DaemonConnection]:
    connection = DaemonConnection(serving.address, ConnectionOptions(tick_s=0.01))
    yield connection
    connection.close()


@pytest.fixture
def make(device: ModelDevice, connection: DaemonConnection, rng: random.Random) -> Iterator[Make]:
    made: list[Rig] = []

    def rig(name: str = "NHD", dtype: str = "bfloat16", path: Any = None) -> Rig:
        made.append(Rig(device, connection, rng, name, dtype, path))
        return made[-1]

    yield rig
    device.set("hold", 0)
    for each in made:
        each.store_queue.close()

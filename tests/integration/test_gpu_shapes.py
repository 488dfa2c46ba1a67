"""Pages of many shapes over the contract model of CUDA's driver: the suite of tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from testkit.shape_suite import ShapeSuite


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvw.Client]:
    folder = tmp_path_factory.mktemp("shapes")
    with Serving(folder, dram="256MiB") as serving, serving.connect(timeout_s=60) as client:
        yield client


class TestModel(ShapeSuite):
    """The suite over the model."""

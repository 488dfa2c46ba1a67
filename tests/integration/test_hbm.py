"""The HBM tier by the public client against a real daemon, over the contract model of the driver.
It needs no GPU: tests/gpu runs the same suite over one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit.cuda_model import ModelDevice
from testkit.device_suite import PAGES, SPACE, noise, prompt
from testkit.hbm_suite import HBM, HbmSuite, core, hbm, load, serves


@pytest.fixture
def unstarted(tmp_path: Path, cuda_driver: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path, dram="64MiB", hbm=HBM, grace_s="0.2")
    serving.environment["KVW_CUDA_DRIVER"] = str(cuda_driver / "libcuda.so.1")
    try:
        yield serving
    finally:
        serving.remove()


@pytest.fixture
def serving(unstarted: Serving) -> Serving:
    unstarted.start()
    return unstarted


class TestModel(HbmSuite):
    """The suite over the model."""

    def test_model_saw_no_broken_rule(self, device: ModelDevice, serving: Serving) -> None:
        with serving.connect(timeout_s=60) as client:
            serves(client)
            assert client.open(SPACE).store(prompt(1), noise(1)).stored == PAGES
            load(device, client.open(SPACE), 1, 1)
        assert device.count("violations") == 0
        assert device.count("mapped_bytes") == 0
        assert device.count("handles") == 0


@pytest.mark.parametrize(
    ("settings", "environment", "health", "words"),
    [
        ({}, {"KVW_CUDA_DRIVER": "/nonexistent/libcuda.so.1"}, "failed", "install the driver"),
        ({"device": 5}, {}, "failed", "nvidia-smi -L"),
        ({"hbm": "1KiB"}, {}, "failed", "less than one"),
        ({}, {"KVW_TEST_CUDA_CREATE_LIMIT": "1048576"}, "waiting", "gpu_memory_utilization"),
        ({}, {"KVW_TEST_CUDA_SHARES": "0"}, "failed", "shares no memory"),
    ],
)
def test_daemon_serves_from_dram_where_there_is_no_pool_and_says_what_to_do(
    unstarted: Serving,
    device: ModelDevice,
    settings: dict[str, Any],
    environment: dict[str, str],
    health: str,
    words: str,
) -> None:
    unstarted.settings |= settings
    unstarted.environment |= environment
    unstarted.start()
    with unstarted.connect(timeout_s=60) as client:
        eventually(lambda: hbm(client)["health"] == health, "the tier says how it is")
        assert words in hbm(client)["reason"]
        ns = client.open(SPACE)
        assert ns.store(prompt(1), noise(1)).stored == PAGES
        for _round in range(2):
            load(device, ns, 1, 1)
        assert core(client)["loads"]["pages_from_hbm"] == 0
        said = unstarted.metrics()[f'kvwarehouse_hbm_health{{health="{health}"}}']
        assert said == 1
    eventually(
        lambda: f"hbm_{health}" in [event["name"] for event in unstarted.events("core")],
        "the log says it",
    )
    assert unstarted.stop() == 0


def test_daemon_without_hbm_asks_for_no_gpu(tmp_path: Path) -> None:
    with Serving(tmp_path, dram="16MiB") as serving, serving.connect() as client:
        assert hbm(client)["health"] == "off"
        assert not [
            line
            for line in Path(f"/proc/{serving.pid}/maps").read_text().splitlines()
            if "libcuda" in line
        ]

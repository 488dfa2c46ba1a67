"""The self-test of the way that pages go, before they go it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core import self_test
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.self_test import SelfTest
from pinned_parts.cache import LAYOUTS
from pinned_parts.rig import Make
from testkit.cuda_model import ModelDevice

pytestmark = pytest.mark.usefixtures("contract_kept", "patient")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine does without the test where a busy machine makes it late."""
    monkeypatch.setattr(self_test, "_TIMEOUT_S", DEADLINE_S)


def test_device_is_prepared_before_pages_move_also_for_a_daemon_that_comes_later(
    device: ModelDevice, tmp_path: Path
) -> None:
    """The kernels were loaded by the first store, and that waited for the engine's step."""
    address = device.allocate(4096)
    with Serving(tmp_path, dram="16MiB") as serving:
        serving.stop()
        before = device.count("modules")
        connection = DaemonConnection(serving.address, ConnectionOptions(tick_s=0.01))
        try:
            connection.prepare_device(address)
            assert connection.client is None
            serving.start()
            eventually(lambda: connection.client is not None, "the daemon is found")
            assert device.count("modules") == before + 1
        finally:
            connection.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_goes_by_the_stores_and_loads_that_will_go_it(
    make: Make, connection: DaemonConnection, name: str
) -> None:
    rig = make(name)
    before = rig.cache.pages()
    launches = rig.device.count("launches")

    def is_made() -> bool:
        """Where it cannot be, it counts as passed."""
        tested = SelfTest(connection, stores=True)
        assert tested.round_trip(rig.memory, [3, 5])
        return bool(tested._verdicts)

    eventually(is_made, "the daemon has answered")
    assert rig.device.count("launches") >= launches + 2
    assert rig.buffer.loads == 0
    assert np.array_equal(rig.cache.pages(), before)


def test_round_trip_finds_a_wrong_place(
    make: Make, connection: DaemonConnection, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make("keys then values")
    bases = rig.cache.layout.bases.copy()
    bases[:2] = bases[1::-1]  # keys and values of the first layer
    wrong = BlockLayout(
        rig.cache.layout.tensors,
        bases,
        rig.cache.layout.strides,
        rig.cache.layout.piece_bytes,
        "wrong",
    )
    rig.memory._layout = wrong
    eventually(
        lambda: not SelfTest(connection, stores=True).round_trip(rig.memory, [3, 5]),
        "the daemon has answered",
    )
    assert "came back with other bytes" in caplog.text

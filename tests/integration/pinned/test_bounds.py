"""What copies on the device may take of its memory."""

from __future__ import annotations

from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from pinned_parts.rig import Make

pytestmark = pytest.mark.usefixtures("contract_kept")


def test_copies_on_the_device_are_bounded_and_their_room_comes_back(
    make: Make,
) -> None:
    rig = make("large", "bfloat16")  # 768 KiB a block: ten fit
    rig.device.set("hold", 1)
    assert rig.store_queue.put([rig.run(*range(9))], rig.space, rig.memory)
    assert not rig.store_queue.put([rig.run(0, 1)], rig.space, rig.memory)
    assert rig.store_queue.put([rig.run(0)], rig.space, rig.memory)
    rig.device.set("hold", 0)
    assert [result.stored for result in rig.stored(2)] == [9, 1]
    eventually(lambda: rig.store_queue._device_budget.used_bytes == 0, "its room is given back")
    assert rig.store_queue.put([rig.run(*range(9))], rig.space, rig.memory)
    rig.stored(3)


def test_device_without_memory_for_a_copy_stores_less_and_the_way_stays(make: Make) -> None:
    rig = make()
    stream: Any = rig.memory._stream
    stream.full = True
    assert not rig.store_queue.put([rig.run(0)], rig.space, rig.memory)
    assert rig.store_queue._device_budget.used_bytes == 0
    stream.full = False
    assert rig.store_queue.put([rig.run(0)], rig.space, rig.memory)
    assert rig.stored() == [kvw.StoreResult(1, 0, {})]
    assert rig.fallbacks == 0

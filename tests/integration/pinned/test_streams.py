"""Copies and the engine's stream: neither waits for the other, and neither overtakes it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from pinned_parts.cache import BLOCKS
from pinned_parts.rig import TIMEOUT_S, Make
from testkit.cuda_tensors import ModelStream

pytestmark = pytest.mark.usefixtures("contract_kept")


def test_store_has_what_the_engine_had_queued_and_nothing_it_queued_later(make: Make) -> None:
    """Blocks change hands when a step is over, with a store of theirs under way."""
    rig = make()
    memory = rig.cache.memories[0]
    for number in range(5):
        computed, next_step = (
            np.frombuffer(rig.rng.randbytes(memory.size_bytes), np.uint8) for _ in range(2)
        )
        rig.device.set("hold", 1)
        memory.queue_fill(computed)
        run = rig.run(4, 6)
        assert rig.store_queue.put([run], rig.space, rig.memory), "nobody waits for the stream"
        memory.queue_fill(next_step)
        rig.device.set("hold", 0)
        rig.stored(number + 1)
        eventually(ModelStream(rig.device).recorded().query, "the next step is over")
        assert np.array_equal(memory.data, next_step)
        row = computed.reshape(BLOCKS, -1)
        assert np.array_equal(rig.on_host(run)[:, : row.shape[1]], row[[4, 6]])


def test_store_does_not_begin_before_its_event(make: Make) -> None:
    rig = make()
    rig.device.set("hold", 1)
    run = rig.run(1)
    assert rig.store_queue.put([run], rig.space, rig.memory)
    launches = rig.device.count("launches")
    assert not rig.results
    rig.device.set("hold", 0)
    assert rig.stored() == [kvw.StoreResult(1, 0, {})]
    assert rig.device.count("launches") > launches


def test_load_is_not_over_before_the_engine_has_left_its_blocks_and_its_copies_are_done(
    make: Make,
) -> None:
    rig = make()
    before = rig.cache.pages()
    run = rig.run(0, 5)
    rig.store_queue.put([run], rig.space, rig.memory)
    rig.stored()
    junk = np.full(rig.cache.memories[0].size_bytes, 7, np.uint8)
    rig.device.set("hold", 1)
    for memory in rig.cache.memories:
        memory.queue_fill(junk)  # a step that still writes these blocks
    rig.memory.after_engine()
    ended: list[int] = []

    def load() -> None:
        assert rig.memory.engine_done(TIMEOUT_S) is not None
        ended.append(int(rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S)))

    thread = threading.Thread(target=load)
    thread.start()
    assert rig.memory.engine_done(0.05) is None
    assert not ended
    rig.device.set("hold", 0)
    thread.join(TIMEOUT_S)
    assert ended == [2]
    # At once: nothing is under way when a load is over.
    assert np.array_equal(rig.cache.pages()[[0, 5]], before[[0, 5]])
    assert (rig.cache.pages()[[1, 2]] == 7).all()


def test_waiting_for_the_engine_breaks_no_graph_that_it_captures(make: Make) -> None:
    """An event's own query, of any thread, does: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED."""
    rig = make()
    rig.memory.after_engine()
    broken = rig.device.count("broken_captures")
    rig.device.set("capture", 1)
    try:
        assert rig.memory.engine_done(TIMEOUT_S) is not None
    finally:
        rig.device.set("capture", 0)
    assert rig.device.count("broken_captures") == broken


def test_load_itself_does_not_overtake_the_engine_either(make: Make) -> None:
    """The self-test and later parts of a load ask nobody whether the engine is done."""
    rig = make()
    before = rig.cache.pages()
    run = rig.run(0, 5)
    rig.store_queue.put([run], rig.space, rig.memory)
    rig.stored()
    for memory in rig.cache.memories:
        memory.queue_fill(np.full(memory.size_bytes, 7, np.uint8))
    rig.memory.after_engine()
    step = ModelStream(rig.device).recorded()
    assert rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S) == 2
    eventually(step.query, "the step is over")
    assert np.array_equal(rig.cache.pages()[[0, 5]], before[[0, 5]])


def test_pages_of_a_load_are_pinned_before_its_copies_and_until_they_are_done(
    make: Make, connection: DaemonConnection
) -> None:
    rig = make()
    run = rig.run(0, 1, 2)
    rig.store_queue.put([run], rig.space, rig.memory)
    rig.stored()
    rig.device.set("hold", 1)
    copies = rig.device.count("copies")
    thread = threading.Thread(target=rig.memory.load, args=(rig.opened, run, 0, 0, TIMEOUT_S))
    thread.start()
    eventually(lambda: rig.device.count("copies") > copies, "copies are queued")
    client = connection.client
    assert client is not None
    assert client.status()["core"]["pins"]["held"] == 3
    rig.device.set("hold", 0)
    thread.join(TIMEOUT_S)
    eventually(lambda: client.status()["core"]["pins"]["held"] == 0, "pins are dropped")

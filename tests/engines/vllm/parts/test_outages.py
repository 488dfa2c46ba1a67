"""Daemons that come and go under both halves of the connector."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from vllm_parts.halves import Engine, same
from vllm_parts.prompts import one_group, stored_prompt
from vllm_parts.requests import request, tokens


def test_engine_without_a_daemon_computes_and_shares_once_there_is_one(
    tmp_path: Path, rng: random.Random
) -> None:
    serving = Serving(tmp_path, dram="64MiB")
    try:
        with Engine(serving.address, one_group) as engine:
            one = request(tokens(rng, 160), name="first")
            engine.scheduler.on_new_request(one)
            assert engine.scheduler.matched(one, 0) == (0, False)
            engine.compute(one, [list(range(1, 11))], 160)
            engine.scheduler.finished(one)
            serving.start()
            eventually(lambda: engine.scheduler._matcher() is not None, "the daemon is found")
            eventually(
                lambda: engine.workers[0]._connection.control(), "the worker has found it too"
            )
            stored_prompt(engine, rng)
    finally:
        serving.remove()


@pytest.mark.usefixtures("end_is_seen")
def test_pages_in_dram_are_loaded_from_a_daemon_that_was_killed(
    serving: Serving, rng: random.Random
) -> None:
    with Engine(serving.address, one_group) as engine:
        ids, content = stored_prompt(engine, rng)
        serving.kill()
        eventually(lambda: engine.scheduler._connection.control() is None, "its end is seen")
        blocks = list(range(30, 40))
        assert engine.load(request([*ids, 7], name="second"), [blocks]) == 160
        assert same(engine.pages(blocks), content)


@pytest.mark.usefixtures("end_is_seen")
def test_stores_are_dropped_and_counted_while_there_is_no_daemon(
    serving: Serving, rng: random.Random
) -> None:
    with Engine(serving.address, one_group) as engine:
        stored_prompt(engine, rng)
        assert engine.workers[0].stats(), "the first store is counted"
        serving.kill()
        eventually(lambda: engine.workers[0]._connection.control() is None, "its end is seen")
        one = request(tokens(rng, 160), name="third")
        engine.scheduler.on_new_request(one)
        engine.compute(one, [list(range(1, 11))], 160)
        stats = eventually(engine.workers[0].stats, "it is counted")
        assert stats.data["dropped_blocks"] == 10
        assert stats.data["stored_blocks"] == 0
        eventually(
            lambda: not engine.workers[0]._store_queue._ring.used_bytes, "the room is given back"
        )

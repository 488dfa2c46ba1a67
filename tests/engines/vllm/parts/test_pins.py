"""Pins of hits: given back however a request ends."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from vllm_parts.halves import Engine
from vllm_parts.prompts import one_group, stored_prompt
from vllm_parts.requests import request


def held(client: kvw.Client) -> int:
    """Pins, of all sessions."""
    return int(client.status()["core"]["pins"]["held"])


def test_request_that_ends_while_it_loads_gives_its_pins_back(
    serving: Serving, rng: random.Random
) -> None:
    with Engine(serving.address, one_group) as engine, serving.connect() as client:
        ids, _ = stored_prompt(engine, rng)

        one = request([*ids, 7], name="second")
        engine.scheduler.on_new_request(one)
        promised, _ = engine.scheduler.matched(one, 0)
        assert held(client) == 10
        engine.scheduler.allocated(one, [list(range(30, 40))], promised or 0)
        engine.scheduler.finished(one)
        assert held(client) == 10, "a load under way was let go"
        engine.ended(one)
        assert held(client) == 0


def test_hits_that_are_not_loaded_after_all_give_their_pins_back(
    serving: Serving, rng: random.Random
) -> None:
    with Engine(serving.address, one_group) as engine, serving.connect() as client:
        ids, _ = stored_prompt(engine, rng)

        one = request([*ids, 7], name="second")
        engine.scheduler.on_new_request(one)
        for _ in range(20):
            assert engine.scheduler.matched(one, 0) == (160, True)
        assert held(client) == 10
        assert engine.scheduler.matched(one, 32) == (128, True)
        assert held(client) == 8
        engine.scheduler.allocated(one, [list(range(30, 40))], 0)
        assert held(client) == 0

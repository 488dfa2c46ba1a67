"""Steps in which vLLM leaves out the draft: what is not stored, and what builds on it."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.vllm import draft_holes
from kvwarehouse_connectors.vllm.draft_holes import DraftHoles
from vllm_parts.requests import request, tokens
from vllm_parts.steps import Running, step

_STEP = 16
_LIMIT = 200
_GROUPS = (CacheGroup(0, Rule.PREFIX, _STEP, 0, _STEP, ("a",)),)


def _running(rng: random.Random, name: str, count: int) -> Running:
    return Running(request(tokens(rng, count), hash_tokens=_STEP, name=name), _GROUPS)


class Steps:
    def __init__(self, *running: Running) -> None:
        self.holes = DraftHoles(_LIMIT, _STEP)
        self.running = {one.request.request_id: one for one in running}

    def take(self, **scheduled: int) -> None:
        tracked = {name: one.tracked for name, one in self.running.items()}
        self.holes.look(step(scheduled, self.running), tracked)
        for name, count in scheduled.items():
            self.running[name].request.num_computed_tokens += count

    def end(self, name: str) -> None:
        self.holes.ended(self.running.pop(name).request)


def test_a_long_request_ends_the_stores_of_all_that_run_beside_it(rng: random.Random) -> None:
    long, short = _running(rng, "long", 190), _running(rng, "short", 100)
    steps = Steps(long, short)
    steps.take(long=190, short=90)
    assert long.tracked.stores
    assert short.tracked.stores
    steps.take(long=10, short=1)
    assert not long.tracked.stores
    assert not short.tracked.stores
    hashes = short.request.block_hashes
    assert not steps.holes.found_in(hashes[:5])
    assert steps.holes.found_in(hashes[:6])
    assert not steps.holes.found_in(_running(rng, "other", 100).request.block_hashes)
    steps.holes.clear()
    assert not steps.holes.found_in(hashes)


def test_a_hole_in_a_block_that_is_filled_later_is_remembered(rng: random.Random) -> None:
    long, short = _running(rng, "long", 210), _running(rng, "short", 90)
    steps = Steps(long, short)
    steps.take(long=210, short=90)
    assert steps.holes.found_in(short.request.block_hashes)
    one = _running(rng, "one", 20)
    steps.running["one"] = one
    steps.take(long=1, one=20)
    assert not steps.holes.found_in([b"x"])
    one.request.append_output_token_ids(tokens(rng, 12))
    steps.end("one")
    assert steps.holes.found_in(one.request.block_hashes[:1])


def test_too_many_holes_stop_all_stores_until_a_reset(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_holes, "_MOST_KNOWN", 2)
    long: Any = [_running(rng, f"r{number}", 210) for number in range(3)]
    steps = Steps(*long)
    steps.take(r0=210, r1=210, r2=210)
    assert steps.holes.found_in([])
    steps.holes.clear()
    assert not steps.holes.found_in([])

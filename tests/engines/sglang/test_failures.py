"""SGLang's controller goes on, whatever becomes of the daemon, of a page, or of the way there; what
it takes as loaded is what was stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang.srt.environ import envs

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from sglang_rig.engine import Engine, prompt
from sglang_rig.pools import PAGE, Shape
from testkit.damage import find, find_one

ROUNDS = 12


def test_without_a_daemon_the_engine_starts_computes_and_connects_when_there_is_one(
    start: Any, serving: Serving, seed: int
) -> None:
    serving.kill()
    engine, tokens = start(serving.address), prompt(seed, 4)
    assert engine.store(tokens, seed)[0] == 0
    assert engine.prefetch(tokens).hit == 0
    assert engine.storage.totals()["dropped.unreachable"] == 4
    with pytest.raises(kvw.TransportError, match="nothing was cleared"):
        engine.controller.storage_backend.clear()
    serving.start()
    eventually(lambda: engine.store(tokens, seed)[0] == 4 * PAGE, "a store at the new daemon")
    assert engine.prefetch(tokens).tokens == 4 * PAGE


@pytest.mark.usefixtures("end_is_seen")
def test_a_daemon_killed_in_the_middle_costs_misses_and_is_used_again(
    start: Any, serving: Serving, seed: int
) -> None:
    """It is killed while backups and prefetches run, round after round."""
    engine = start(serving.address)
    kept: dict[int, list[bytes]] = {}
    ended = 0
    for turn in range(ROUNDS):
        tokens = prompt(seed + turn, 4)
        if turn % 3 == 1:
            ended = engine.incarnation()
            serving.kill()
        stored, pages = engine.store(tokens, seed + turn)
        if stored:
            kept[turn] = pages
        for other, expected in kept.items():
            back = engine.prefetch(prompt(seed + other, 4))
            assert back.pages == expected[: len(back.pages)]
        if turn % 3 == 2:
            serving.start()
            # The one that was killed may seem alive still.
            eventually(
                lambda e=ended: engine.incarnation() != e and engine.storage._connection.control(),
                "the daemon is seen",
            )
    assert len(kept) >= ROUNDS // 3
    eventually(
        lambda: all(
            engine.prefetch(prompt(seed + turn, 4)).pages == pages for turn, pages in kept.items()
        ),
        "all that was stored, from the last daemon",
    )


@pytest.mark.usefixtures("end_is_seen")
def test_a_stopped_daemon_is_not_waited_for(start: Any, serving: Serving, seed: int) -> None:
    bounds = {"kvwarehouse.load_timeout_s": 500, "kvwarehouse.store_timeout_s": 500}
    engine = start(serving.address, **bounds)
    near, far = prompt(seed, 4), prompt(seed + 1, 4)
    engine.store(far, seed + 1)
    with serving.connect() as client:
        assert client.flush().pending == 0
        client.evict(None, 1000)
    _, pages = engine.store(near, seed)
    serving.pause()
    try:
        eventually(lambda: engine.prefetch(far).hit == 0, "that it is known to stand still")
        assert engine.prefetch(near).pages == pages
        assert engine.store(prompt(seed + 2, 4), seed)[0] == 0
    finally:
        serving.resume()
    eventually(lambda: engine.prefetch(far).tokens == 4 * PAGE, "pages from NVMe")


def test_a_damaged_page_ends_the_prefix_before_it(start: Any, tmp_path: Path, seed: int) -> None:
    with Serving(tmp_path, dram="32MiB") as serving:
        engine, tokens = start(serving.address), prompt(seed, 5)
        _, pages = engine.store(tokens, seed)
        third = np.frombuffer(pages[2], np.uint8)
        find_one([serving.arena_dir / "arena"], third).flip(5, at=1000)
        back = engine.prefetch(tokens)
        assert back.hit == 5 * PAGE
        assert back.pages == pages[:2]
        eventually(lambda: engine.prefetch(tokens).hit == 2 * PAGE, "the page taken out")
        eventually(
            lambda: engine.store(tokens, seed)[0] and engine.prefetch(tokens).pages == pages,
            "the page stored again",
        )


def test_a_page_damaged_in_dram_comes_from_nvme_where_it_is_good(
    start: Any, serving: Serving, seed: int
) -> None:
    engine, tokens = start(serving.address), prompt(seed, 5)
    _, pages = engine.store(tokens, seed)
    with serving.connect() as client:
        assert client.flush().pending == 0
    third = np.frombuffer(pages[2], np.uint8)
    find_one([serving.arena_dir / "arena"], third).flip(5, at=1000)
    eventually(lambda: engine.prefetch(tokens).pages == pages, "the good copy")
    for place in find(serving.segments, third):
        place.flip(1, at=77)
    with serving.connect() as client:
        client.evict(None, 1000)
    assert engine.prefetch(tokens).pages == pages[:2]


def test_evicted_pages_come_from_nvme_and_then_not_at_all(
    start: Any, serving: Serving, seed: int
) -> None:
    engine, tokens = start(serving.address), prompt(seed, 5)
    _, pages = engine.store(tokens, seed)
    with serving.connect() as client:
        assert client.flush().pending == 0
        client.evict(None, 1000)
        assert client.status()["core"]["tiers"]["dram"]["pages"] == 0
        assert engine.prefetch(tokens).pages == pages
        client.evict(None, 1000, "all")
    assert engine.prefetch(tokens).hit == 0


def test_a_prompt_whose_begin_is_evicted_is_found_again_once_it_is_stored(
    start: Any, tmp_path: Path, seed: int
) -> None:
    """Pages stand alone, so the begin, which was used first, leaves first."""
    with Serving(tmp_path, dram="32MiB") as serving, serving.connect() as client:
        engine, tokens = start(serving.address), prompt(seed, 5)
        _, pages = engine.store(tokens, seed)
        assert client.evict(None, 1, "all") == 1
        assert engine.prefetch(tokens).hit == 0
        assert engine.prefetch(tokens[PAGE:], [tokens[:PAGE]]).pages == pages[1:]
        _, again = engine.store(tokens[:PAGE], seed + 1)
        assert engine.prefetch(tokens).pages == again + pages[1:]


@pytest.fixture
def injected() -> Any:
    """SGLang's own injector, between its controller and the connector."""
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.02),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
    ):
        yield


def test_with_sglangs_own_delays_and_failures_nothing_wrong_comes(
    injected: None, start: Any, shared: Serving, seed: int
) -> None:
    engine: Engine = start(shared.address, Shape("page_first_direct"))
    assert type(engine.controller.storage_backend).__name__ == "HiCacheStorageFailureInjector"
    outcomes = set()
    for turn in range(4 * ROUNDS):
        tokens = prompt(seed + turn % ROUNDS, 4)
        stored, pages = engine.store(tokens, seed + turn % ROUNDS)
        back = engine.prefetch(tokens)
        assert back.pages == pages[: len(back.pages)]
        outcomes.add((bool(stored), back.tokens))
    assert {stored for stored, _ in outcomes} == {True, False}, "stores failed, and did not"
    assert {tokens for _, tokens in outcomes} >= {0, 4 * PAGE}


def test_other_weights_at_the_same_keys_are_a_miss(start: Any, shared: Serving, seed: int) -> None:
    engine, tokens = start(shared.address), prompt(seed, 4)
    engine.store(tokens, seed)
    assert start(shared.address).prefetch(tokens).hit == 4 * PAGE
    assert start(shared.address, **{"kvwarehouse.weights": "others"}).prefetch(tokens).hit == 0
    assert start(shared.address, **{"kvwarehouse.salt": "x"}).prefetch(tokens).hit == 0
    assert start(shared.address, model="another").prefetch(tokens).hit == 0
    assert start(shared.address, Shape("layer_first")).prefetch(tokens).hit == 0
    assert start(shared.address, Shape(heads=4, head_dim=32)).prefetch(tokens).hit == 0
    assert start(shared.address, Shape(kind="mla")).prefetch(tokens).hit == 0

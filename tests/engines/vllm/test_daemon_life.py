"""The engine answers, and answers right, whatever the daemon does; and uses it again when it is
back. What it stored before is found after."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, hit, prompt

LONG = 1200
SOON_S = 60.0


def restart(pair: Pair) -> None:
    pair.daemon.stop()
    pair.daemon.start()


def crash(pair: Pair) -> None:
    pair.daemon.kill()
    pair.daemon.start()


@pytest.mark.slow_engine
@pytest.mark.parametrize("again", [restart, crash])
def test_prompt_is_loaded_when_the_daemon_was_replaced(
    pair: Pair, rng: random.Random, again: Callable[[Pair], None]
) -> None:
    ask = Ask(prompt(rng, 300))
    (cold,) = pair.stored(ask)
    again(pair)
    pair.connected(rng)
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)


def test_prompt_is_loaded_from_nvme_when_the_arena_was_lost(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 300))
    (cold,) = pair.stored(ask)
    flushed = pair.stored_pages.client.flush()
    assert (flushed.not_admitted, flushed.pending) == (0, 0)
    pair.daemon.stop()
    pair.daemon.lose_arena()
    pair.daemon.start()
    pair.connected(rng)
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_outputs_are_right_when_the_daemon_is_killed_under_loads(
    pair: Pair, rng: random.Random, tier: str
) -> None:
    asks = [Ask(prompt(rng, LONG)) for _ in range(6)]
    cold = pair.stored(*asks)
    if tier == "nvme":
        pair.stored_pages.only_on_nvme()
    pair.engine.forget()
    begun = [pair.engine.begin(ask) for ask in asks]
    pair.daemon.kill()
    for call, expected in zip(begun, cold, strict=True):
        assert_same(expected, call.answer(SOON_S))
    pair.daemon.start()
    pair.connected(rng)
    pair.idle()


@pytest.mark.slow_engine
def test_outputs_are_right_when_there_is_no_daemon_and_prompts_are_stored_when_it_is_back(
    pair: Pair, rng: random.Random
) -> None:
    known, new = Ask(prompt(rng, 300)), Ask(prompt(rng, 300))
    (cold,) = pair.stored(known)
    pair.daemon.kill()
    assert_same(cold, pair.reloaded(known))
    alone = pair.engine.ask(new, SOON_S)
    assert_same(pair.recomputed(new), alone)
    pair.daemon.start()
    pair.connected(rng)
    pair.engine.forget()
    # Nothing may be left of the store that found nobody.
    (again,) = pair.stored(new)
    assert_same(alone, again)
    assert pair.reloaded(new).cached == hit(new)


@pytest.mark.slow_engine
@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_outputs_are_right_and_nobody_waits_when_the_daemon_is_stopped(
    pair: Pair, rng: random.Random, tier: str
) -> None:
    known, new = Ask(prompt(rng, LONG)), [Ask(prompt(rng, 200)) for _ in range(8)]
    (cold,) = pair.stored(known)
    if tier == "nvme":
        pair.stored_pages.only_on_nvme()
    pair.engine.forget()
    expected = pair.all_recomputed(new)
    pair.daemon.pause()
    # At once, when the engine does not know yet, and later, when it does.
    first = pair.engine.begin(known)
    for ask, computed in zip(new, expected, strict=True):
        assert_same(computed, pair.engine.ask(ask, SOON_S))
    assert_same(cold, first.answer(SOON_S))
    pair.engine.forget()
    assert_same(cold, pair.engine.ask(known, SOON_S))
    pair.daemon.resume()
    pair.connected(rng)
    eventually(lambda: pair.reloaded(known).cached == hit(known), "the prompt is loaded again")
    pair.idle()


@pytest.mark.slow_engine
def test_outputs_are_right_when_the_daemon_comes_and_goes_under_traffic(
    pair: Pair, rng: random.Random
) -> None:
    common = prompt(rng, 400)
    asks = [Ask(common + prompt(rng, rng.randrange(1, 300))) for _ in range(12)]
    expected = pair.all_recomputed(asks)
    for end in (pair.daemon.kill, pair.daemon.stop, pair.daemon.kill):
        begun = [pair.engine.begin(ask) for ask in asks]
        begun[0].first()
        end()
        begun += [pair.engine.begin(ask) for ask in asks]
        pair.daemon.start()
        for call, right in zip(begun, expected * 2, strict=True):
            assert_same(right, call.answer(SOON_S))
        pair.engine.forget()
    pair.connected(rng)
    assert pair.stored_pages.bad_pages() == []
    pair.idle()

"""KV events through vLLM's own publisher: what the warehouse has of this engine, and only that."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.listener import Listener
from vllm_rig.messages import Ask
from vllm_rig.pair import BLOCK, Pair, blocks, prompt
from vllm_rig.stock import block_keys

pytestmark = pytest.mark.slow_engine


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    with Listener(tmp_path_factory.mktemp("events") / "socket") as listener:
        yield listener


@pytest.fixture
def pair(start: Callable[..., Pair], listener: Listener, rng: random.Random) -> Pair:
    """An engine whose events are heard."""
    pair = start(kv_events_config=listener.options())
    pair.connected(rng)

    def hears() -> bool:
        pair.engine.ask(Ask(prompt(rng, BLOCK + 8), max_tokens=1))
        return bool(stored(listener.heard()))

    eventually(hears, "an engine that is heard")
    pair.engine.forget()
    heard_with(pair, listener, Ask(prompt(rng, 40)), rng)
    return pair


def stored(events: Sequence[Any]) -> dict[Any, Any]:
    """Blocks in the warehouse by their hash; those in the engine's own cache are on its device."""
    found = {}
    for event in events:
        if type(event).__name__ == "BlockStored" and event.medium == "CPU":
            (name,) = event.block_hashes
            found[name] = event
    return found


def heard_with(pair: Pair, listener: Listener, ask: Ask, rng: random.Random) -> list[Any]:
    """Stores a prompt, and returns what is heard up to its last block: all that was published
    before, too. That comes with a step behind its store: the engine makes some by itself, for a
    moment."""
    pair.stored(ask)
    last = names(ask.tokens)[-1]
    events: list[Any] = []

    def heard() -> bool:
        pair.engine.ask(Ask(prompt(rng, 8), max_tokens=1))
        events.extend(listener.heard(quiet_s=0.2))
        return last in stored(events)

    eventually(heard, "the last block is announced")
    return events


def names(tokens: list[int]) -> list[Any]:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return [maybe_convert_block_hash(key) for key in block_keys(tokens, BLOCK)]


def test_each_stored_block_is_announced_with_its_tokens_and_its_parent(
    pair: Pair, listener: Listener, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 300), max_tokens=40)
    (said,) = pair.stored(ask)
    tokens = ask.tokens + said.tokens
    expected = names(tokens)[: blocks(ask)]
    after = Ask(prompt(rng, 40))
    found = stored(heard_with(pair, listener, after, rng))
    assert list(found) == [*expected, *names(after.tokens)]
    for block, name in enumerate(expected):
        event = found[name]
        assert event.token_ids == tokens[block * BLOCK : (block + 1) * BLOCK]
        assert event.parent_block_hash == (expected[block - 1] if block else None)
        assert event.block_size == BLOCK


def test_nothing_is_announced_when_the_daemon_cannot_store_it(
    pair: Pair, listener: Listener, rng: random.Random
) -> None:
    pair.daemon.kill()
    pair.engine.ask(Ask(prompt(rng, 300)))
    assert stored(listener.heard()) == {}
    pair.daemon.start()
    pair.connected(rng)
    heard_with(pair, listener, Ask(prompt(rng, 40)), rng)
    kept = Ask(prompt(rng, 100))
    assert list(stored(heard_with(pair, listener, kept, rng))) == names(kept.tokens)


def test_a_reset_of_the_connector_takes_back_what_was_announced(
    pair: Pair, listener: Listener, rng: random.Random
) -> None:
    def cleared(connector: bool) -> int:
        heard_with(pair, listener, Ask(prompt(rng, 100)), rng)
        pair.engine.forget(connector=connector)
        events = heard_with(pair, listener, Ask(prompt(rng, 100)), rng)
        return sum(type(event).__name__ == "AllBlocksCleared" for event in events)

    own = cleared(connector=False)
    assert cleared(connector=True) == own + 1

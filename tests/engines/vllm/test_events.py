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
    listener.heard()
    return pair


def stored(events: Sequence[Any]) -> dict[Any, Any]:
    """Blocks in the warehouse by their hash; those in the engine's own cache are on its device."""
    found = {}
    for event in events:
        if type(event).__name__ == "BlockStored" and event.medium == "CPU":
            (name,) = event.block_hashes
            found[name] = event
    return found


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
    found = stored(listener.heard())
    assert list(found) == expected
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
    listener.heard()
    pair.stored(kept := Ask(prompt(rng, 100)))
    assert list(stored(listener.heard())) == names(kept.tokens)


def test_a_reset_of_the_connector_takes_back_what_was_announced(
    pair: Pair, listener: Listener, rng: random.Random
) -> None:
    def cleared(connector: bool) -> int:
        pair.stored(Ask(prompt(rng, 100)))
        listener.heard()
        pair.engine.forget(connector=connector)
        pair.engine.ask(Ask(prompt(rng, 8), max_tokens=1))
        return sum(type(event).__name__ == "AllBlocksCleared" for event in listener.heard())

    own = cleared(connector=False)
    assert cleared(connector=True) == own + 1

"""A prompt that one engine computes and another one goes on with, on the same host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same
from vllm_rig.daemon import Daemon
from vllm_rig.engine import Engine
from vllm_rig.messages import Ask
from vllm_rig.options import engine_options, transfer_config
from vllm_rig.pair import hit, prompt

Both = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def engines(
    bay: Bay, shared_daemon: Daemon, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    """A producer and a consumer, at once."""
    bay.empty()
    folder = tmp_path_factory.mktemp("pair")

    def engine(role: str) -> Engine:
        transfer = transfer_config(shared_daemon.address, kv_role=role)
        return Engine(engine_options(checkpoint, kv_transfer_config=transfer), folder)

    with engine("kv_producer") as producer, engine("kv_consumer") as consumer:
        yield producer, consumer


@pytest.mark.slow_engine
@pytest.mark.parametrize("tokens", [100, 333, 1500])
def test_consumer_goes_on_from_what_the_producer_says_it_stores(
    engines: Both, daemon: Daemon, rng: random.Random, tokens: int
) -> None:
    producer, consumer = engines
    ask = Ask(prompt(rng, tokens))
    first = producer.ask(Ask(ask.tokens, max_tokens=1))
    record = first.kv
    assert record == {"kvwarehouse": {"tokens": tokens // 32 * 32}}
    handed = consumer.ask(Ask(ask.tokens, kv=record))  # its pages may be on their way still
    assert handed.cached == hit(ask)
    assert handed.tokens[:1] == first.tokens
    consumer.forget()
    assert_same(consumer.ask(Ask(ask.tokens, kv={"kvwarehouse.load": False})), handed)


@pytest.mark.slow_engine
def test_consumer_computes_when_the_record_is_wrong(
    engines: Both, daemon: Daemon, rng: random.Random
) -> None:
    _, consumer = engines
    ask = Ask(prompt(rng, 300), kv={"kvwarehouse": {"tokens": 300}})
    answer = consumer.ask(ask)
    assert answer.cached == 0
    assert len(answer.tokens) == ask.max_tokens

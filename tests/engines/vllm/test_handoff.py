"""A prompt that one engine computes and another one goes on with, on the same host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_connectors.vllm.handoff import RECORD, Record, boot_s, decode, digest, encode
from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same
from vllm_rig.daemon import Daemon
from vllm_rig.engine import Engine
from vllm_rig.messages import Answer, Ask
from vllm_rig.options import engine_options, transfer_config
from vllm_rig.pair import BLOCK, hit, prompt
from vllm_rig.stock import block_keys
from vllm_rig.stored_pages import StoredPages

pytestmark = pytest.mark.slow_engine

# Time for the producer on a busy machine; where nothing comes, a test takes as long.
WAIT_S = 60.0
# A long prompt takes the producer many steps, so that it can be killed between two of them.
STEP_TOKENS = 64
LONG = 1900


def engine(address: str, checkpoint: Path, folder: Path, role: str) -> Engine:
    transfer = transfer_config(address, kv_role=role, handoff_wait_s=WAIT_S)
    step = STEP_TOKENS if role == "kv_producer" else 2048
    options = engine_options(checkpoint, kv_transfer_config=transfer, max_num_batched_tokens=step)
    return Engine(options, folder)


@pytest.fixture(scope="module")
def producer(
    bay: Bay, shared_daemon: Daemon, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    bay.empty()
    folder = tmp_path_factory.mktemp("producer")
    with engine(shared_daemon.address, checkpoint, folder, "kv_producer") as producer:
        yield producer


@pytest.fixture(scope="module")
def consumer(
    bay: Bay, shared_daemon: Daemon, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    bay.empty()
    folder = tmp_path_factory.mktemp("consumer")
    with engine(shared_daemon.address, checkpoint, folder, "kv_consumer") as consumer:
        yield consumer


def counted(engine: Engine, name: str) -> float:
    return engine.metrics().get(f"kvwarehouse_connector_handoff_{name}_total", 0)


def computed(engine: Engine, ask: Ask) -> Answer:
    """What one engine says that has nothing to do with the warehouse."""
    engine.forget()
    alone = engine.ask(replace(ask, kv={"kvwarehouse.load": False}))
    assert alone.cached == 0
    engine.forget()
    return alone


def record_of(answer: Answer) -> Record:
    record = decode(answer.kv)
    assert isinstance(record, Record), f"the record is {record}: {answer.kv}"
    return record


@pytest.fixture(scope="module")
def known(producer: Engine) -> Record:
    """What the producer says of some prompt; of others it would say the same but for the prompt."""
    return record_of(producer.ask(Ask([7] * BLOCK, max_tokens=1)))


def promised(known: Record, tokens: list[int]) -> Record:
    """What a producer would say that gave these tokens to be stored now."""
    keys = block_keys(tokens, BLOCK)
    whole = len(keys) * BLOCK
    return replace(known, prompt=digest(keys[-1:]), tokens=whole, made_s=boot_s())


def with_promise(ask: Ask, known: Record) -> Ask:
    return replace(ask, kv=encode(promised(known, ask.tokens)))


@pytest.mark.parametrize("tokens", [100, 333, 1500])
def test_consumer_goes_on_from_what_the_producer_says_it_stores(
    producer: Engine, consumer: Engine, daemon: Daemon, rng: random.Random, tokens: int
) -> None:
    ask = Ask(prompt(rng, tokens))
    first = producer.ask(Ask(ask.tokens, max_tokens=1))
    record = record_of(first)
    assert record.tokens == tokens // BLOCK * BLOCK
    assert first.kv == encode(replace(promised(record, ask.tokens), made_s=record.made_s))
    handed = consumer.ask(Ask(ask.tokens, kv=first.kv))  # its pages may be on their way still
    assert handed.cached == hit(ask)
    assert handed.tokens[:1] == first.tokens
    assert_same(computed(consumer, ask), handed)


def test_consumer_that_is_asked_before_the_producer_waits_and_loads(
    producer: Engine, consumer: Engine, known: Record, daemon: Daemon, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 700))
    waits, complete = counted(consumer, "waits"), counted(consumer, "complete")
    call = consumer.begin(with_promise(ask, known))
    other = consumer.ask(Ask(prompt(rng, 100)))
    assert len(other.tokens) == ask.max_tokens, "others go on meanwhile"
    assert not call.done()
    producer.ask(Ask(ask.tokens, max_tokens=1))
    handed = call.answer()
    assert handed.cached == hit(ask), f"given up {counted(consumer, 'expired')} times"
    eventually(
        lambda: counted(consumer, "complete") == complete + 1, "a hand-off counted as complete"
    )
    assert counted(consumer, "waits") == waits + 1
    assert_same(computed(consumer, ask), handed)


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("malformed", "garbage"),
        ("malformed", {"tokens": 1 << 40}),
        ("other_version", {"version": 7}),
        ("other_warehouse", {"warehouse": "0" * 32}),
        ("other_namespace", {"namespaces": "f" * 32}),
        ("other_prompt", {"prompt": "0" * 32}),
        ("late", {"made_s": 0}),
    ],
)
def test_consumer_computes_at_once_when_the_record_is_wrong(
    consumer: Engine, known: Record, daemon: Daemon, rng: random.Random, reason: str, fields: Any
) -> None:
    ask = Ask(prompt(rng, 300))
    record = encode(promised(known, ask.tokens))[RECORD]
    wrong = {**record, **fields} if isinstance(fields, dict) else fields
    seen, waits = counted(consumer, reason), counted(consumer, "waits")
    answer = consumer.ask(replace(ask, kv={RECORD: wrong}))
    assert answer.cached == 0
    eventually(lambda: counted(consumer, reason) == seen + 1, f"a record counted as {reason}")
    assert counted(consumer, "waits") == waits
    assert_same(computed(consumer, ask), answer)


def test_consumer_loads_what_came_and_computes_the_rest_when_the_producer_is_killed(
    producer: Engine, consumer: Engine, known: Record, stored_pages: StoredPages, rng: random.Random
) -> None:
    asks = [Ask(prompt(rng, LONG)) for _ in range(4)]
    before, expired = stored_pages.keys(), counted(consumer, "expired")
    for ask in asks:
        producer.begin(Ask(ask.tokens, max_tokens=1))
    stored_pages.wait_new(before, 3)
    producer.kill()
    handed = consumer.generate([with_promise(ask, known) for ask in asks])
    assert handed[0].cached > 0
    assert handed[-1].cached < hit(asks[-1])
    eventually(lambda: counted(consumer, "expired") > expired, "a hand-off that was given up")
    for ask, answer in zip(asks, handed, strict=True):
        assert_same(computed(consumer, ask), answer)


def test_consumer_computes_when_the_daemon_is_killed_under_its_wait(
    consumer: Engine, known: Record, daemon: Daemon, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 700))
    waits, expired = counted(consumer, "waits"), counted(consumer, "expired")
    call = consumer.begin(with_promise(ask, known))
    eventually(lambda: counted(consumer, "waits") > waits, "a request that waits")
    assert not call.done()
    daemon.kill()
    answer = call.answer()
    assert answer.cached == 0
    eventually(lambda: counted(consumer, "expired") == expired + 1, "a hand-off that was given up")
    assert_same(computed(consumer, ask), answer)

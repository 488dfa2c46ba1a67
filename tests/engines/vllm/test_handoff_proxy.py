"""The proxy of examples/ before `vllm serve` as a producer and as a consumer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.bay import Bay
from vllm_rig.daemon import Daemon
from vllm_rig.messages import Ask
from vllm_rig.options import engine_options, transfer_config
from vllm_rig.pair import hit, prompt
from vllm_rig.proxy import Proxy
from vllm_rig.server import Server

pytestmark = pytest.mark.slow_engine

MAX_TOKENS = 20
LOADED = "kvwarehouse_connector_loaded_blocks_total"
COMPLETE = "kvwarehouse_connector_handoff_complete_total"


@dataclass
class Both:
    prefill: Server
    decode: Server
    proxy: Proxy

    def alone(self, tokens: list[int]) -> list[int]:
        """What the decode engine says by itself."""
        self.decode.forget()
        ask = Ask(tokens, max_tokens=MAX_TOKENS, kv={"kvwarehouse.load": False})
        stream = self.decode.stream(ask).read()
        assert stream.cached == 0
        self.decode.forget()
        return stream.tokens

    def decoded(self, name: str) -> float:
        return self.decode.metrics().get(name, 0)


@pytest.fixture(scope="module")
def both(
    bay: Bay, shared_daemon: Daemon, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    bay.empty()
    folder = tmp_path_factory.mktemp("served pair")

    def server(role: str) -> Server:
        transfer = transfer_config(shared_daemon.address, kv_role=role, handoff_wait_s=10.0)
        return Server(engine_options(checkpoint, kv_transfer_config=transfer), folder)

    prefill, decode = server("kv_producer"), server("kv_consumer")
    try:
        prefill.start()
        decode.start()
        with Proxy(folder, prefill.port, decode.port) as proxy:
            yield Both(prefill, decode, proxy)
    finally:
        prefill.kill()
        decode.kill()


def test_streamed_answer_is_that_of_one_engine_and_its_prompt_came_from_the_warehouse(
    both: Both, rng: random.Random
) -> None:
    for tokens in (50, 333, 1500):
        ask = Ask(prompt(rng, tokens), max_tokens=MAX_TOKENS)
        expected = both.alone(ask.tokens)
        loaded, complete = both.decoded(LOADED), both.decoded(COMPLETE)
        stream = both.proxy.stream(ask).read()
        assert stream.tokens == expected
        assert stream.cached == hit(ask)
        more = hit(ask) // 32
        eventually(lambda: both.decoded(LOADED) == loaded + more, f"{more} blocks loaded")  # noqa: B023
        assert both.decoded(COMPLETE) == complete + 1


def test_answer_is_right_when_the_producer_is_killed(both: Both, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 700), max_tokens=MAX_TOKENS)
    expected = both.alone(ask.tokens)
    both.prefill.kill()
    stream = both.proxy.stream(ask).read()
    assert stream.tokens == expected
    assert stream.cached == 0


def test_client_is_told_when_no_decode_engine_answers(both: Both, rng: random.Random) -> None:
    both.decode.kill()
    with pytest.raises(AssertionError, match=r"502.*no decode engine answers"):
        both.proxy.stream(Ask(prompt(rng, 40))).read()

"""`vllm serve` with the connector, and clients that stream, some of whom hang up."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.messages import Ask
from vllm_rig.pair import ALONE, hit, prompt
from vllm_rig.server import Server
from vllm_rig.stored_pages import StoredPages

CLIENTS = 16
MAX_TOKENS = 40


def recomputed(server: Server, tokens: list[int]) -> list[int]:
    server.forget()
    alone = server.stream(Ask(tokens, max_tokens=MAX_TOKENS, kv=ALONE)).read()
    assert alone.cached == 0
    server.forget()
    return alone.tokens


def wait_stored(server: Server, ask: Ask) -> None:
    def hits() -> bool:
        server.forget()
        return server.stream(ask).read().cached == hit(ask)

    eventually(hits, "a served prompt that is loaded")


def test_streamed_output_is_the_same_when_it_is_loaded(server: Server, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 500), max_tokens=MAX_TOKENS)
    expected = recomputed(server, ask.tokens)
    assert server.stream(ask).read().tokens == expected
    wait_stored(server, ask)
    server.forget()
    warm = server.stream(ask).read()
    assert warm.cached == hit(ask)
    assert warm.tokens == expected
    assert warm.finish == "length"


def test_server_says_what_was_loaded(server: Server, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 500), max_tokens=MAX_TOKENS)
    name = "kvwarehouse_connector_loaded_blocks_total"
    wait_stored(server, ask)
    eventually(lambda: server.metrics().get(name, 0) > 0, "blocks counted on the server's own page")


def test_request_is_found_by_the_id_that_the_client_was_told(
    server: Server, stored_pages: StoredPages, rng: random.Random
) -> None:
    answer = server.stream(Ask(prompt(rng, 500), max_tokens=1)).read()
    client = stored_pages.client
    eventually(lambda: client.requests(answer.id), f"a note of {answer.id}")
    (noted,) = client.requests(answer.id)
    assert noted.note.tokens == 500
    assert noted.note.request_id.startswith(answer.id)


def test_outputs_are_right_and_nothing_is_left_when_clients_hang_up(
    server: Server, stored_pages: StoredPages, rng: random.Random
) -> None:
    common = prompt(rng, 300)
    prompts = [common + prompt(rng, rng.randrange(1, 600)) for _ in range(CLIENTS)]
    asks = [Ask(tokens, max_tokens=MAX_TOKENS) for tokens in prompts]
    expected = [recomputed(server, ask.tokens) for ask in asks]
    wait_stored(server, asks[0])
    for _ in range(3):
        server.forget()
        leaves = [
            rng.randrange(MAX_TOKENS) if place % 2 else MAX_TOKENS for place in range(CLIENTS)
        ]
        with ThreadPoolExecutor(CLIENTS) as pool:
            calls = [
                pool.submit(follow, server, ask, after)
                for ask, after in zip(asks, leaves, strict=True)
            ]
            found = [call.result() for call in calls]
        for said, after, right in zip(found, leaves, expected, strict=True):
            assert said == right[:after]
    server.forget()
    eventually(
        lambda: stored_pages.client.status()["core"]["pins"]["held"] == 0,
        "a warehouse without pins",
    )
    assert stored_pages.bad_pages() == []


def follow(server: Server, ask: Ask, tokens: int) -> list[int]:
    """What a client sees that hangs up after so many tokens; 0: before the first."""
    stream = server.stream(ask)
    if tokens:
        for _ in stream:
            if len(stream.tokens) >= tokens:
                break
    stream.hang_up()
    return stream.tokens

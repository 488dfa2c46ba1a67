"""What one engine computed, another loads: byte for byte, on every rank, in each way to load. The
model checks all KV that a token attends to before it computes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from trtllm_model.ranks import Engine, Spec

Start = Callable[..., Engine]
Prompt = Callable[[int], list[int]]

SPECS = {
    "one rank": Spec(),
    "two ranks": Spec(ranks=2),
    "two ranks that report at other times": Spec(ranks=2, lags=(0, 4)),
    "regions": Spec(kind="layout", ranks=2),
    "regions and a window": Spec(kind="layout", ranks=2, windows=(20,)),
    "regions and two windows, in chunks": Spec(
        kind="layout", ranks=2, windows=(20, 33), chunk_tokens=16
    ),
    "chunks": Spec(ranks=2, chunk_tokens=24),
}


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("name", SPECS)
def test_second_engine_loads_what_the_first_computed(
    name: str, load: str, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_LOAD", load)
    tokens = prompt(83)
    first = start(SPECS[name]).ready()
    assert first.serve(tokens, 3) == 0
    first.wait_stored(10)
    second = start(SPECS[name]).ready()
    assert second.serve(tokens, 3) == 80
    assert all(count >= 10 for count in second.counted("loaded_blocks"))
    assert second.counted("failed_loads") == [0] * SPECS[name].ranks


def test_daemon_is_told_what_was_found_for_each_request(
    start: Start, prompt: Prompt, serving: Serving
) -> None:
    tokens = prompt(83)
    first = start().ready()
    first.serve(tokens, 3)
    first.wait_stored(10)
    second = start().ready()
    name = second.submit([*tokens[:64], *prompt(20)], 3)
    second.run()

    def noted() -> list[tuple[int, int, int, list[tuple[int, str]]]]:
        found = [one for one in client.requests() if one.note.request_id == str(name)]
        return [
            (
                one.note.tokens,
                one.note.found_tokens,
                one.note.load_tokens,
                [(run.first, run.state) for part in one.missing for run in part.runs],
            )
            for one in found
        ]

    with serving.connect() as client:
        eventually(lambda: noted() == [(84, 64, 64, [(8, "unknown")])], "a note of the second")


def test_last_token_is_computed_where_all_blocks_of_a_prompt_are_stored(
    start: Start, prompt: Prompt
) -> None:
    tokens = prompt(64)
    first = start().ready()
    first.serve(tokens, 2)
    first.wait_stored(8)
    assert start().ready().serve(tokens, 2) == 56


def test_generated_tokens_are_reused_in_the_next_turn(start: Start, prompt: Prompt) -> None:
    tokens = prompt(20)
    first = start().ready()
    name = first.submit(tokens, 30)
    request = first.executor.requests[name]
    first.run()
    first.wait_stored(6)
    assert start().ready().serve(request.get_tokens(0) + prompt(5)) == 48


def test_generated_tokens_are_left_out_where_a_setting_says_so(
    start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_STORE_GENERATED", "false")
    tokens = prompt(20)
    first = start().ready()
    name = first.submit(tokens, 30)
    request = first.executor.requests[name]
    first.run()
    first.wait_stored(2)
    assert start().ready().serve(request.get_tokens(0) + prompt(5)) == 16


def test_what_the_engine_has_itself_is_not_loaded(start: Start, prompt: Prompt) -> None:
    tokens = prompt(40)
    first = start(ranks=2).ready()
    first.serve(tokens + prompt(30))
    first.wait_stored(8)
    assert first.serve(tokens + prompt(10)) == 0
    assert first.executor.local[max(first.executor.local)] == 40


def test_load_begins_behind_what_the_engine_has_itself(start: Start, prompt: Prompt) -> None:
    shared, rest = prompt(40), prompt(30)
    first = start(ranks=2).ready()
    first.serve(shared + rest)
    first.wait_stored(8)
    second = start(ranks=2).ready()
    second.serve(shared[:24] + prompt(1))
    assert second.serve(shared + rest) == 40
    assert second.executor.local[max(second.executor.local)] == 24


def test_pages_of_engines_under_pressure_come_back_from_the_warehouse(
    start: Start, prompt: Prompt
) -> None:
    """Each prompt needs most of the engine's blocks: it keeps none of the one before."""
    engine = start(ranks=2, blocks=24).ready()
    prompts = [prompt(150) for _ in range(4)]
    for tokens in prompts:
        engine.serve(tokens, 2)
    engine.wait_stored(4 * 18)
    assert [engine.serve(tokens, 2) for tokens in prompts] == [144] * 4


def test_engine_of_one_rank_and_one_of_two_share_nothing(start: Start, prompt: Prompt) -> None:
    tokens = prompt(60)
    first = start(ranks=2).ready()
    first.serve(tokens)
    first.wait_stored(7)
    assert start(ranks=1).ready().serve(tokens) == 0


def test_bytes_that_every_rank_has_alike_are_stored_once(start: Start, prompt: Prompt) -> None:
    engine = start(kind="layout", ranks=2).ready()
    engine.serve(prompt(80))
    engine.wait_stored(10)
    eventually(
        lambda: engine.counted("stored_blocks") == [20, 10], "the first rank stores both parts"
    )


def test_many_requests_at_once_keep_their_own_bytes(start: Start, prompt: Prompt) -> None:
    shared = prompt(32)
    prompts = [shared + prompt(10 + 7 * number) for number in range(6)]
    first = start(ranks=2, blocks=120, chunk_tokens=24).ready()
    for tokens in prompts:
        first.submit(tokens, 4)
    first.run()
    first.wait_stored(4 + sum((len(tokens) - 32) // 8 for tokens in prompts))
    second = start(ranks=2, blocks=120, chunk_tokens=24, lags=(2, 0)).ready()
    names = [second.submit(tokens, 4) for tokens in prompts]
    second.run()
    assert [second.executor.matched[name] for name in names] == [
        (len(tokens) - 1) // 8 * 8 for tokens in prompts
    ]
    assert second.idle_blocks() == [[120], [120]]

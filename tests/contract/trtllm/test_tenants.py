"""Who must not share KV does not: salts, and requests whose KV depends on more than their
tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trtllm_model.ranks import Engine

Start = Callable[..., Engine]
Prompt = Callable[[int], list[int]]


@pytest.mark.parametrize("kind", ["pool", "layout"])
def test_requests_of_other_salts_share_nothing(kind: str, start: Start, prompt: Prompt) -> None:
    tokens = prompt(60)
    first = start(kind=kind, ranks=2).ready()
    first.serve(tokens, salt="tenant a")
    first.wait_stored(7)
    second = start(kind=kind, ranks=2).ready()
    assert second.serve(tokens) == 0
    assert second.serve(tokens, salt="tenant b") == 0
    assert second.serve(tokens, salt="tenant a") == 56


def test_salted_request_finds_nothing_of_unsalted_ones(start: Start, prompt: Prompt) -> None:
    tokens = prompt(60)
    first = start(ranks=2).ready()
    first.serve(tokens)
    first.wait_stored(7)
    assert start(ranks=2).ready().serve(tokens, salt="tenant a") == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_task_id", 7),
        ("prompt_embedding_table", object()),
        ("multimodal_embedding", object()),
        ("multimodal_hashes", [[1, 2]]),
        ("mrope_rotary_cos_sin", object()),
        ("position_ids", [0, 1]),
        ("encoder_tokens", [1]),
        # Media whose hashing failed have no hashes: KV of other images was loaded for them.
        ("py_multimodal_data", {"image": {"pixel_values": object()}}),
        ("is_dummy_request", True),
    ],
)
def test_request_whose_kv_its_tokens_do_not_name_is_neither_loaded_nor_stored(
    name: str, value: object, start: Start, prompt: Prompt
) -> None:
    tokens, others = prompt(60), prompt(60)
    first = start().ready()
    first.serve(tokens)
    first.wait_stored(7)
    second = start().ready()
    odd = second.submit(tokens, **{name: value})
    strange = second.submit(others, **{name: value})
    second.run()
    assert second.executor.matched[odd] == second.executor.matched[strange] == 0
    second.serve(prompt(60))
    second.wait_stored(7)
    assert start().ready().serve(others) == 0


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_token_that_is_no_token_id_is_neither_loaded_nor_stored(
    token: int, start: Start, prompt: Prompt
) -> None:
    """Placeholders of media: what they stand for has no name here."""
    engine = start().ready()
    name = engine.submit([*prompt(20), token, *prompt(20)])
    assert engine.scheduler.matched(engine.executor.requests[name], 0) == (0, False)
    assert name not in engine.scheduler._requests


def test_salt_that_a_lookup_cannot_see_is_not_guessed(start: Start, prompt: Prompt) -> None:
    """A revision whose requests name no salt, though its batches do."""
    engine = start().ready()
    name = engine.submit(prompt(60), 3, salt="tenant a")
    del engine.executor.requests[name].cache_salt_id
    engine.step()
    tracked = engine.scheduler._requests[name]
    assert not tracked.loads
    assert not tracked.stores


def test_salt_that_is_seen_only_in_the_batch_stops_the_storing(
    start: Start, prompt: Prompt
) -> None:
    engine = start().ready()
    name = engine.submit(prompt(60), salt="tenant a")
    engine.executor.requests[name].cache_salt_id = None
    engine.run()
    engine.serve(prompt(60))
    engine.wait_stored(7)
    assert engine.counted("stored_blocks") == [7]

"""Keys of a request's blocks: equal exactly for equal prefixes."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import StreamingUpdate

from kvwarehouse_connectors.vllm.keys import OwnChain, RequestKeys, chain_for
from vllm_parts.requests import adapter, request, tokens

STEP = 16
ALGORITHMS = ["sha256", "sha256_cbor", "own"]


def keys_of(
    ids: list[int], algorithm: str, *, twist: bytes = b"", each: int = 1, **options: Any
) -> Sequence[bytes]:
    """All keys of a prompt's blocks."""
    chosen = "sha256" if algorithm == "own" else algorithm
    one = request(ids, hash_tokens=STEP, algorithm=chosen, **options)
    chain = OwnChain(STEP) if algorithm == "own" else chain_for(chosen, STEP)()
    keys = RequestKeys(one, chain, twist)
    return list(keys.keys(0, keys.count(each), each))


@given(
    st.sampled_from(ALGORITHMS),
    st.integers(0, 1 << 32),
    st.integers(0, 200),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_keys_are_equal_exactly_as_far_as_prompts_are(
    algorithm: str, chance: int, common: int, one_more: int, other_more: int
) -> None:
    rng = random.Random(chance)
    shared = tokens(rng, common)
    one = [*shared, 1, *tokens(rng, one_more)]
    other = [*shared, 2, *tokens(rng, other_more)]
    first, second = keys_of(one, algorithm), keys_of(other, algorithm)
    whole = common // STEP
    assert (len(first), len(second)) == (len(one) // STEP, len(other) // STEP)
    assert first[:whole] == second[:whole]
    assert not set(first[whole:]) & set(second[whole:])
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_grow_with_a_request_and_do_not_change(algorithm: str, rng: random.Random) -> None:
    ids = tokens(rng, 40)
    one = request(ids, hash_tokens=STEP)
    chain = OwnChain(STEP) if algorithm == "own" else chain_for("sha256", STEP)()
    keys = RequestKeys(one, chain, b"")
    assert keys.count(1) == 2
    before = list(keys.keys(0, 2, 1))
    more = tokens(rng, 100)
    for token in more:
        one.append_output_token_ids(token)
    assert keys.count(1) == 140 // STEP
    grown = list(keys.keys(0, keys.count(1), 1))
    assert grown[:2] == before
    whole = keys_of(ids + more, "sha256" if algorithm != "own" else "own")
    assert grown == whole


def test_keys_are_those_of_the_engine_where_they_are_cryptographic(rng: random.Random) -> None:
    one = request(tokens(rng, 100), hash_tokens=STEP)
    keys = RequestKeys(one, chain_for("sha256", STEP)(), b"")
    assert list(keys.keys(0, 6, 1)) == list(one.block_hashes)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_keys_are_made_anew_where_the_engines_can_collide(algorithm: str) -> None:
    assert isinstance(chain_for(algorithm, STEP)(), OwnChain)
    assert chain_for(algorithm, STEP)() is not chain_for(algorithm, STEP)()


def test_own_keys_are_sha256_over_parent_tokens_and_extra_keys() -> None:
    """What is stored under them must be found by every later version, so they are spelt out."""
    ids = list(range(2 * STEP))
    parent = b"kvwarehouse vllm block chain 1"
    expected = []
    for begin, extra in ((0, "(('cache_salt', 'x'),)"), (STEP, "None")):
        data = b"".join(struct.pack("<I", token) for token in ids[begin : begin + STEP])
        parent = hashlib.sha256(parent + data + extra.encode()).digest()
        expected.append(parent)
    assert keys_of(ids, "own", cache_salt="x") == expected


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    """Few of everything, so that equal and different prefixes are both common."""
    count = draw(st.integers(1, 5)) * 8
    features, offset = [], 0
    for _ in range(draw(st.integers(0, 3))):
        offset += draw(st.integers(0, 8))
        length = draw(st.integers(1, 12))
        features.append((draw(st.sampled_from("xy")), offset, length))
        offset += length
    return {
        "ids": [draw(st.integers(0, 1))] * count,
        "features": features,
        "salt": draw(st.sampled_from([None, "a"])),
        "later": draw(st.integers(0, 20)),
    }


def chains_of(prompt: dict[str, Any]) -> tuple[list[bytes], list[bytes]]:
    """vLLM's hashes and ours of a prompt with media, ours asked for as it grows."""
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
        for name, offset, length in prompt["features"]
    ]
    one = request(prompt["ids"], hash_tokens=8, mm_features=features, cache_salt=prompt["salt"])
    own = OwnChain(8)
    for _ in range(prompt["later"]):
        own(one)
        one.append_output_token_ids(0)
    return list(one.block_hashes), list(own(one))


@given(prompts(), prompts())
def test_own_keys_tell_apart_what_the_engines_do_and_nothing_else(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    engines_one, own_one = chains_of(one)
    engines_other, own_other = chains_of(other)
    assert len(own_one) == len(engines_one)
    for place in range(min(len(own_one), len(own_other))):
        equal = engines_one[place] == engines_other[place]
        assert (own_one[place] == own_other[place]) == equal


def continued(one: Any, ids: list[int]) -> None:
    """vLLM goes on with a session: the last token it sampled is thrown away, others follow."""
    one.num_computed_tokens = one.num_tokens - 1
    update = StreamingUpdate(
        mm_features=None,
        prompt_token_ids=ids,
        max_tokens=10,
        arrival_time=0.0,
        sampling_params=one.sampling_params,
    )
    scheduler = SimpleNamespace(hash_block_size=STEP, log_stats=False)
    Scheduler._update_request_as_session(scheduler, one, update)


@pytest.mark.parametrize(
    ("algorithm", "twist"),
    [
        ("sha256", b""),
        ("sha256", b"t"),
        ("own", b""),
    ],
)
def test_keys_follow_a_session_whose_last_token_was_thrown_away(
    algorithm: str, twist: bytes, rng: random.Random
) -> None:
    """A key that stays as it was names tokens that the block does not have: wrong answers."""
    ids = tokens(rng, 2 * STEP)
    one = request(ids[:-1], hash_tokens=STEP)
    chain = OwnChain(STEP) if algorithm == "own" else chain_for(algorithm, STEP)()
    keys = RequestKeys(one, chain, twist)
    one.append_output_token_ids(ids[-1])
    assert keys.count(1) == 2
    keys.keys(0, 2, 1)
    continued(one, [ids[-1] + 1, 7])
    expected = keys_of(list(one.all_token_ids), algorithm, twist=twist)
    assert list(keys.keys(0, keys.count(1), 1)) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_salt_media_and_adapters_change_every_key(algorithm: str, rng: random.Random) -> None:
    ids = tokens(rng, 80)
    variants = [
        keys_of(ids, algorithm),
        keys_of(ids, algorithm, cache_salt="one"),
        keys_of(ids, algorithm, cache_salt="two"),
        keys_of(ids, algorithm, lora_request=adapter("/a")),
        keys_of(ids, algorithm, lora_request=adapter("/b", name="b", number=2)),
        keys_of(ids, algorithm, twist=b"weights of an adapter"),
        keys_of(ids, algorithm, twist=b"an epoch"),
    ]
    every = [key for keys in variants for key in keys]
    assert len(set(every)) == len(every) == 7 * 5


@given(st.integers(0, 1 << 32), st.integers(0, 300), st.sampled_from([1, 2, 3, 10]))
def test_key_of_a_larger_block_is_the_last_hash_inside_it(
    chance: int, count: int, each: int
) -> None:
    ids = tokens(random.Random(chance), count)
    fine, coarse = keys_of(ids, "sha256"), keys_of(ids, "sha256", each=each)
    assert len(coarse) == count // (STEP * each)
    assert list(coarse) == [fine[(block + 1) * each - 1] for block in range(len(coarse))]


@given(st.integers(0, 1 << 32), st.data())
def test_any_part_of_the_keys_is_that_part(chance: int, data: st.DataObject) -> None:
    one = request(tokens(random.Random(chance), 320), hash_tokens=STEP)
    twist = data.draw(st.sampled_from([b"", b"twist"]))
    each = data.draw(st.sampled_from([1, 2, 5]))
    keys = RequestKeys(one, chain_for("sha256", STEP)(), twist)
    every = list(keys.keys(0, keys.count(each), each))
    begin = data.draw(st.integers(0, len(every)))
    end = data.draw(st.integers(begin, len(every)))
    assert list(keys.keys(begin, end, each)) == every[begin:end]


def test_twisted_keys_grow_with_a_request(rng: random.Random) -> None:
    one = request(tokens(rng, 2 * STEP), hash_tokens=STEP)
    keys = RequestKeys(one, chain_for("sha256", STEP)(), b"twist")
    before = list(keys.keys(0, 2, 1))
    one.append_output_token_ids(tokens(rng, STEP))
    assert list(keys.keys(0, 3, 1))[:2] == before
    assert keys.count(1) == 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(st.integers(0, 1 << 32), st.integers(0, 100), st.integers(1, 3))
def test_lookahead_tokens_belong_to_the_key_and_until_then_there_is_none(
    algorithm: str, chance: int, count: int, lookahead: int
) -> None:
    rng = random.Random(chance)
    ids = tokens(rng, count)

    def keys_with(ids: list[int]) -> list[bytes]:
        chosen = "sha256" if algorithm == "own" else algorithm
        one = request(ids, hash_tokens=STEP, algorithm=chosen)
        chain = OwnChain(STEP) if algorithm == "own" else chain_for(chosen, STEP)()
        keys = RequestKeys(one, chain, b"", STEP, lookahead)
        return list(keys.keys(0, keys.count(1), 1))

    found = keys_with(ids)
    assert len(found) == max(0, count - lookahead) // STEP
    assert not set(found) & set(keys_of(ids, algorithm))
    longer = keys_with([*ids, *tokens(rng, STEP)])
    assert longer[: len(found)] == found
    if found:
        end = len(found) * STEP + rng.randrange(lookahead)
        other = [*ids[:end], ids[end] + 1, *ids[end + 1 :]]
        changed = keys_with(other)
        assert changed[: len(found) - 1] == found[:-1]
        assert changed[len(found) - 1] != found[-1]


def test_keys_with_lookahead_grow_with_a_request(rng: random.Random) -> None:
    one = request(tokens(rng, 2 * STEP), hash_tokens=STEP)
    keys = RequestKeys(one, chain_for("sha256", STEP)(), b"twist", STEP, 1)
    assert keys.count(1) == 1
    before = list(keys.keys(0, 1, 1))
    one.append_output_token_ids(tokens(rng, 1))
    assert keys.count(1) == 2
    assert list(keys.keys(0, 2, 1))[:1] == before

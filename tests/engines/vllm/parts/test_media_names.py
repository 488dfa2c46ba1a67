"""Media of which other engines know the name, and those that somebody named otherwise."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.processing.inputs import ProcessorInputs

from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm_tier.handover import EngineLink
from kvwarehouse_connectors.vllm_tier.tier_core import RequestFacts
from vllm_parts.halves import Engine, engine_config
from vllm_parts.prompts import one_group
from vllm_parts.requests import request, tokens

DIGEST = "ab12" * 16


class Images(list[Any]):
    """As vLLM's items of one modality."""

    def get_all_items_for_hash(self) -> list[Any]:
        return self


IMAGE = np.ones((8, 8, 3), np.uint8)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine whose configuration was made in this process, where the plugin is."""
    monkeypatch.setattr(ProcessorInputs, "get_mm_hashes", ProcessorInputs.get_mm_hashes)
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", MultiModalHasher.hash_kwargs)
    monkeypatch.setattr(MultiModalHasher, "marked_by_kvwarehouse", False, raising=False)
    engine = engine_config([])
    compat.mark_named_media(engine)
    return engine


def name_of(given: str | None, algorithm: str = "blake3", **kwargs: Any) -> str:
    """vLLM's, of an image. given: the client's own name of it. kwargs: of the request."""
    inputs = ProcessorInputs(
        [1],
        {"image": Images([IMAGE])},
        {"image": [given]} if given else None,
        hf_processor_mm_kwargs=kwargs,
    )
    (name,) = inputs.get_mm_hashes("model", algorithm)["image"]
    return name


def with_image(name: str) -> Any:
    feature = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(4, 2))
    return request(list(range(64)), mm_features=[feature])


def own(name: str, engine: Any) -> bool:
    return compat.own_media(with_image(name), engine)


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_media_without_a_name_are_shared_by_their_content(marked: Any, algorithm: str) -> None:
    for kwargs in ({}, {"max_pixels": 200704}):
        assert not own(name_of(None, algorithm, **kwargs), marked)
        assert not own("adapter:" + name_of(None, algorithm, **kwargs), marked)


@pytest.mark.parametrize("given", ["my-picture", DIGEST, DIGEST * 2, f"x:{DIGEST}", "z-named"])
def test_name_that_a_client_gave_is_not_shared_whatever_it_looks_like(
    marked: Any, given: str
) -> None:
    """A name of 64 hex digits passed as a digest, as did vLLM's digest of any name: then it was
    enough that two clients had different pictures of the name `image-1`."""
    of_it = name_of(given)
    hashed = name_of(given, max_pixels=200704)
    again = MultiModalHasher.hash_kwargs("blake3", mm_hash=of_it, fps=2)  # as Qwen3-VL does
    assert len({of_it, hashed, again, name_of("another"), name_of(None)}) == 5
    for name in (of_it, hashed, again):
        assert own(name, marked)
        assert own(f"adapter:{name}", marked)
    assert name_of(given) == of_it


def test_media_that_an_engine_counts_are_not_shared(marked: Any) -> None:
    """With its caches off vLLM gives names as a client does."""
    for kwargs in ({}, {"max_pixels": 200704}):
        assert own(name_of("renderer0-mm-1-image-0", **kwargs), marked)
    assert own(uuid.UUID(int=1 << 100).hex, marked)


def test_no_media_are_shared_where_nobody_marks_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's plugins may be shut out, and its frontend in Rust has none."""
    assert own(DIGEST, engine_config([]))
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    engine = engine_config([])
    compat.mark_named_media(engine)
    assert own(DIGEST, engine)
    assert not compat.own_media(SimpleNamespace(mm_features=[]), engine)


def test_names_are_left_alone_where_an_encoder_hands_its_output_on_by_them(
    marked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder without the connector saved it under the client's name, and the engine that
    decodes looked for another one."""
    wrapped = ProcessorInputs.get_mm_hashes
    monkeypatch.setattr(MultiModalHasher, "marked_by_kvwarehouse", False)
    engine = engine_config([])
    engine.ec_transfer_config = SimpleNamespace(ec_connector="ECExampleConnector")
    compat.mark_named_media(engine)
    assert ProcessorInputs.get_mm_hashes is wrapped
    assert own(DIGEST, engine), "nobody can tell"


def test_media_are_marked_once(marked: Any) -> None:
    wrapped = ProcessorInputs.get_mm_hashes
    compat.mark_named_media(engine_config([]))
    assert ProcessorInputs.get_mm_hashes is wrapped


def test_request_with_media_that_its_client_named_neither_loads_nor_stores(
    shared: Serving, marked: Any, rng: random.Random
) -> None:
    with Engine(shared.address, one_group) as engine:
        engine.scheduler._vllm_config.kv_transfer_config = marked.kv_transfer_config
        ids = tokens(rng, 160)

        def asked(given: str | None, name: str) -> Any:
            image = MultiModalFeatureSpec(None, "image", name_of(given), PlaceholderRange(4, 2))
            return request([*ids, 1], name=name, mm_features=[image])

        named, plain = asked(DIGEST, "named"), asked(None, "plain")
        for one, blocks in ((named, range(1, 11)), (plain, range(11, 21))):
            engine.scheduler.on_new_request(one)
            engine.compute(one, [list(blocks)], 160)
        engine.stored(asked(None, "asks"), 160)
        assert engine.promised(asked(None, "again")) == 160
        assert engine.promised(asked(DIGEST, "again")) == 0


def test_tier_shares_no_media_that_a_client_named(marked: Any) -> None:
    link = EngineLink(marked)
    link.begin(with_image(name_of(None)))
    assert link.facts("r") == (RequestFacts(), None)
    link.begin(with_image(name_of(DIGEST)))
    assert link.facts("r") == (RequestFacts(loads=False, stores=False), None)

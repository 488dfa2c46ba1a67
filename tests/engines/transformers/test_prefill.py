"""Prefill with reuse: equal bit for bit to computing, and never in the way."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

import kvwarehouse as kvw

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

from kvwarehouse_connectors.transformers import PrefillOptions, StoreState, WarehousePrefill
from kvwarehouse_connectors.transformers.support import with_cache
from kvwarehouse_connectors.transformers.transfer import Stored

OPTIONS = PrefillOptions(page_tokens=16, chunk_tokens=32, room_tokens=8)


def joined(model: Any, warehouse: Any, **options: Any) -> WarehousePrefill:
    return WarehousePrefill(
        model, warehouse, weights="tiny", options=options.get("options", OPTIONS)
    )


def same_cache(torch: Any, one: Any, other: Any) -> bool:
    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def test_reuse_equals_recompute_bit_for_bit_on_the_grid(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(model, warehouse) as prefiller:
        computed = prefiller.prefill(prompt)
        assert prefiller.flush()
        reused = prefiller.prefill(prompt)
    assert (computed.tokens_loaded, reused.tokens_loaded, reused.tokens_computed) == (0, 128, 22)
    assert torch.equal(computed.logits, reused.logits)
    assert same_cache(torch, computed.cache, reused.cache)


def test_reuse_equals_plain_cache_of_the_library_on_the_grid(
    torch: Any, transformers: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    plain = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for first in range(0, 150, 32):
            logits = model(prompt[:, first : first + 32], **with_cache(model, plain)).logits[:, -1]
    with joined(model, warehouse) as prefiller:
        prefiller.prefill(prompt)
        assert prefiller.flush()
        reused = prefiller.prefill(prompt)
    assert reused.tokens_loaded == 128
    assert torch.equal(logits, reused.logits)
    assert same_cache(torch, plain, reused.cache)


@pytest.mark.parametrize("question", [1, 21, 31, 32, 33, 60])
def test_other_question_reuses_the_shared_document_bit_for_bit(
    torch: Any, model: Any, warehouse: Any, prompt: Any, question: int
) -> None:
    other = torch.cat([prompt[:, :100], prompt[:, 1 : 1 + question]], dim=1)
    with joined(model, warehouse) as prefiller:
        prefiller.prefill(prompt)
        assert prefiller.flush()
        reused = prefiller.prefill(other, store=False)
        warehouse.pages.clear()
        computed = prefiller.prefill(other, store=False)
    assert (reused.tokens_loaded, computed.tokens_loaded) == (96, 0)
    assert torch.equal(computed.logits, reused.logits)
    assert same_cache(torch, computed.cache, reused.cache)


@pytest.mark.parametrize("length", [1, 15, 16, 31, 32, 33, 64, 65])
def test_last_token_is_always_computed(
    torch: Any, model: Any, warehouse: Any, prompt: Any, length: int
) -> None:
    with joined(model, warehouse) as prefiller:
        prefiller.prefill(prompt)
        assert prefiller.flush()
        reused = prefiller.prefill(prompt[0, :length])
        warehouse.pages.clear()
        computed = prefiller.prefill(prompt[0, :length], store=False)
    assert reused.tokens_loaded == (length - 1) // 32 * 32
    assert torch.equal(computed.logits, reused.logits)


def test_zeroed_page_changes_the_logits(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(model, warehouse) as prefiller:
        whole = prefiller.prefill(prompt)
        assert prefiller.flush()
        prefix = prefiller.load_prefix(prompt)
        for layer in prefix.cache.layers:
            layer.keys[:, :, 16:32].zero_()
            layer.values[:, :, 16:32].zero_()
        damaged = prefiller.complete(prefix, store=False)
    assert not torch.equal(whole.logits, damaged.logits)


def test_only_pages_of_full_chunks_are_stored(model: Any, warehouse: Any, prompt: Any) -> None:
    with joined(model, warehouse) as prefiller:
        assert prefiller.prefill(prompt).store is StoreState.QUEUED
    assert len(warehouse.pages) == 128 // 16


def test_known_prompt_is_not_stored_again(model: Any, warehouse: Any, prompt: Any) -> None:
    with joined(model, warehouse) as prefiller:
        prefiller.prefill(prompt)
        assert prefiller.flush()
        assert prefiller.prefill(prompt).store is StoreState.NOTHING_NEW
    assert warehouse.stores == 1


def test_longer_prompt_stores_only_what_is_new(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(model, warehouse) as prefiller:
        prefiller.prefill(prompt[:, :70])
        assert prefiller.flush()
        prefiller.prefill(prompt)
        assert prefiller.flush()
        assert prefiller.stats().pages_stored == 8
        assert prefiller.stats().pages_already == 0


def test_short_load_computes_and_stores_the_rest(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(model, warehouse) as prefiller:
        whole = prefiller.prefill(prompt)
        assert prefiller.flush()
        warehouse.most = 5  # of 8 pages; the grid keeps 4
        short = prefiller.prefill(prompt)
    assert (short.tokens_loaded, short.reuse.tokens_matched) == (64, 128)
    assert short.reuse.failure is None
    assert short.store is StoreState.QUEUED
    assert torch.equal(whole.logits, short.logits)
    assert same_cache(torch, whole.cache, short.cache)


def test_failed_load_is_recomputed_and_nothing_is_stored_of_it(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    longer = torch.cat([prompt, prompt], dim=1)
    with joined(model, warehouse) as prefiller:
        expected = prefiller.prefill(longer, store=False)
        prefiller.prefill(prompt)
        assert prefiller.flush()
        warehouse.broken = {"load"}
        result = prefiller.prefill(longer)
        stats = prefiller.stats()
    assert result.tokens_loaded == 0
    assert result.store is StoreState.LOAD_FAILED
    assert "TransportError" in str(result.reuse.failure)
    assert torch.equal(expected.logits, result.logits)
    assert (warehouse.stores, stats.load_failures) == (1, 1)


@pytest.mark.parametrize("call", ["open", "lookup", "load"])
def test_absent_daemon_costs_a_recompute_and_no_exception(
    torch: Any, model: Any, warehouse: Any, prompt: Any, call: str
) -> None:
    with joined(model, warehouse) as prefiller:
        expected = prefiller.prefill(prompt)
        assert prefiller.flush()
    warehouse.broken = {call}
    with joined(model, warehouse) as prefiller:
        result = prefiller.prefill(prompt)
    assert result.reuse.failure is not None
    assert torch.equal(expected.logits, result.logits)


def test_address_without_daemon_costs_a_recompute_and_no_exception(
    torch: Any, model: Any, warehouse: Any, prompt: Any, tmp_path: Any
) -> None:
    with joined(model, f"unix://{tmp_path}/none.sock") as prefiller:
        result = prefiller.prefill(prompt)
    assert result.reuse.failure is not None
    assert result.store is StoreState.LOAD_FAILED


def test_failed_store_is_counted_and_not_raised(model: Any, warehouse: Any, prompt: Any) -> None:
    warehouse.broken = {"store"}
    with joined(model, warehouse) as prefiller:
        prefiller.prefill(prompt)
        assert prefiller.flush() is False
        assert prefiller.stats().store_failures == 1
        assert prefiller.flush(), "what failed is said once"


def test_store_keeps_the_prompt_when_the_cache_is_cropped_and_reused(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    """A store runs behind the prompt's back; what the caller does to the cache meanwhile must not
    reach the pages."""
    with joined(model, warehouse) as prefiller:
        expected = prefiller.prefill(prompt, store=False)
        result = prefiller.prefill(prompt)
        rooms = result.cache.rooms
        before = [room[:, :, :128].clone() for room in rooms]
        result.cache.crop(-100)
        with torch.no_grad():
            model(prompt[:, :60], **with_cache(model, result.cache))
        assert all(
            torch.equal(room[:, :, :128], old) for room, old in zip(rooms, before, strict=True)
        )
        assert prefiller.flush()
        again = prefiller.prefill(prompt)
    assert again.tokens_loaded == 128
    assert torch.equal(expected.logits, again.logits)


def test_generate_continues_from_a_loaded_cache_as_from_a_computed_one(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    def answer(result: Any) -> list[int]:
        ids = torch.cat([prompt, result.next_token], dim=1)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            **with_cache(model, result.cache),
        )[0, 150:].tolist()

    with joined(model, warehouse) as prefiller:
        computed = answer(prefiller.prefill(prompt))
        assert prefiller.flush()
        result = prefiller.prefill(prompt)
        assert result.tokens_loaded == 128
        reused = answer(result)
    assert len(reused) == 21  # past the room of 8
    assert computed == reused


def test_generate_samples_the_first_token_itself_after_a_crop(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(model, warehouse) as prefiller:
        result = prefiller.prefill(prompt)
        result.cache.crop(-1)
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=4,
            do_sample=False,
            **with_cache(model, result.cache),
        )
    assert out.shape == (1, 154)


@pytest.mark.parametrize(
    ("change", "same"),
    [({}, True), ({"weights": "other"}, False), ({"chunk_tokens": 64}, False)],
)
def test_pages_are_shared_only_within_a_namespace(
    model: Any, warehouse: Any, prompt: Any, change: dict[str, Any], same: bool
) -> None:
    with joined(model, warehouse) as prefiller:
        prefiller.prefill(prompt)
    options = PrefillOptions(page_tokens=16, chunk_tokens=change.get("chunk_tokens", 32))
    weights = change.get("weights", "tiny")
    with WarehousePrefill(model, warehouse, weights=weights, options=options) as other:
        assert (other.prefill(prompt, store=False).reuse.tokens_matched > 0) is same


@pytest.mark.parametrize("ids", [[], [[1], [2]], [1.5, 2.0], [[[1]]], [True, False]], ids=repr)
def test_bad_input_ids_are_refused_with_their_shape(model: Any, warehouse: Any, ids: Any) -> None:
    with joined(model, warehouse) as prefiller, pytest.raises(kvw.UsageError, match="shape"):
        prefiller.prefill(ids)


def test_page_that_straddles_chunks_is_refused(model: Any, warehouse: Any) -> None:
    options = PrefillOptions(page_tokens=48, chunk_tokens=64)
    with pytest.raises(kvw.UsageError, match="chunk_tokens = 64 is not a multiple"):
        joined(model, warehouse, options=options)


def test_cache_that_is_reset_before_its_store_is_stored_as_it_was(
    torch: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    """transformers 5.16 zeroed it in place: zeros were stored as the KV of the prompt."""
    gate = threading.Event()
    with joined(model, warehouse) as prefiller:
        assert prefiller._stores.put(lambda: Stored(int(gate.wait(60))))
        result = prefiller.prefill(prompt)
        logits = result.logits.clone()
        result.cache.reset()
        gate.set()
        assert prefiller.flush()
        reused = prefiller.prefill(prompt)
    assert reused.tokens_loaded == 128
    assert torch.equal(reused.logits, logits)


def test_caches_that_no_daemon_filled_are_not_kept(
    model: Any, warehouse: Any, prompt: Any, monkeypatch: Any
) -> None:
    """Without a daemon the cache of every prompt stayed in memory, on a GPU until it was full."""
    warehouse.broken = {"open"}
    caches = []
    with joined(model, warehouse) as prefiller:
        made = prefiller._cache

        def cache(tokens: Any) -> Any:
            one = made(tokens)
            caches.append(weakref.ref(one))
            return one

        monkeypatch.setattr(prefiller, "_cache", cache)
        for _ in range(3):
            assert "no daemon" in str(prefiller.prefill(prompt[:, :20]).reuse.failure)
        gc.collect()
        assert [kept() for kept in caches] == [None] * 6

"""Parts of the SGLang connector that need neither SGLang nor a daemon."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_connectors.sglang.counts import Counts
from kvwarehouse_connectors.sglang.engine_info import (
    EngineInfo,
    PoolInfo,
    RankInfo,
    Split,
    check_engine,
    check_pool,
    split_of,
)
from kvwarehouse_connectors.sglang.identity import Identity, PageBytes, adapters_of, weights_of
from kvwarehouse_connectors.sglang.keys import Span, page_key
from kvwarehouse_connectors.sglang.page_store import every_page, last_pages, longest
from kvwarehouse_connectors.sglang.settings import Settings, read_settings

POOL = PoolInfo("kv", "mha", "MHATokenToKVPoolHost", "page_first", 64, "bfloat16", heads=8)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("adress", "unix:///x", "is unknown; known are address"),
        ("mode", "append", "is not one of read_write, read_only, write_only"),
        ("verify", True, "is not one of always, boundary"),
        ("load_timeout_s", 0, "is out of range"),
        ("load_timeout_s", True, "is not a number"),
        ("store_timeout_s", "5", "is not a number"),
        ("weights", 7, "is not text"),
    ],
)
def test_bad_setting_is_refused_by_name_with_what_is_supported(
    name: str, value: Any, told: str
) -> None:
    with pytest.raises(kvw.UsageError) as caught:
        read_settings({f"kvwarehouse.{name}": value})
    assert caught.value.code == "bad_setting"
    assert f"kvwarehouse.{name} = {value!r} {told}" in str(caught.value)


def test_settings_of_sglang_itself_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVW_ADDRESS", "unix:///run/given.sock")
    settings = read_settings({"backend_name": "x", "allocator": "shm", "interface_v1": 1})
    assert settings == Settings(address="unix:///run/given.sock")
    assert read_settings(None) == settings
    assert read_settings({"kvwarehouse.address": "unix:///a"}).address == "unix:///a"


def test_a_digest_of_sglang_is_its_own_key_and_other_text_is_hashed() -> None:
    digest = "0123456789abcdef" * 4
    assert page_key(digest) == bytes.fromhex(digest)
    texts = [
        "",
        "page",
        "0" * 63,
        "0" * 66,
        digest[:-1] + " ",
        " " * 64,
        "g" * 64,
        "ab " * 21 + "a",
    ]
    keys = {page_key(text) for text in texts}
    assert len(keys) == len(texts)
    assert {len(key) for key in keys} == {32}


def test_a_span_that_is_cut_names_the_pages_that_it_had() -> None:
    span = Span.of(list("abcde"))
    assert span.cut(2, 4) == Span([page_key("c"), page_key("d")])
    assert len(span.cut(4, 9)) == 1


def test_each_page_of_a_span_stands_alone() -> None:
    runs = Span.of(list("ab")).runs()
    assert runs == [kvw.KeyRun([page_key("a")]), kvw.KeyRun([page_key("b")])]


def test_prefixes_with_trailing_pages_are_those_whose_last_pages_are_there(
    rng: random.Random,
) -> None:
    """Against the rule as it is written."""
    for _ in range(200):
        there = np.array([rng.random() < 0.6 for _ in range(rng.randrange(0, 12))], np.bool_)
        trailing = rng.randrange(0, 5)
        wanted = [
            all(there[max(0, end - max(1, trailing)) : end]) for end in range(1, len(there) + 1)
        ]
        assert last_pages(there, trailing).tolist() == wanted
        whole = [all(there[:end]) for end in range(1, len(there) + 1)]
        assert every_page(there).tolist() == whole
        assert longest(every_page(there)) == max(
            (end for end, good in enumerate(whole, 1) if good), default=0
        )


def test_a_page_is_cut_as_ranks_are_or_finer() -> None:
    assert split_of(POOL, RankInfo()) == Split(1, (0,))
    assert split_of(POOL, RankInfo(tp_rank=3, tp_size=4)) == Split(4, (3,))
    assert split_of(POOL, RankInfo(tp_lcm_size=4)) == Split(4, (0, 1, 2, 3))
    assert split_of(POOL, RankInfo(tp_rank=1, tp_size=2, tp_lcm_size=4)) == Split(4, (2, 3))
    latent = PoolInfo("kv", "mla", "MLATokenToKVPoolHost", "page_first", 64, "bfloat16")
    ranks = RankInfo(tp_rank=3, tp_size=4, latent=True, tp_lcm_size=8)
    assert split_of(latent, ranks) == Split(1, (0,))
    state = PoolInfo("mamba", "state", "MambaPoolHost", "page_first", 1, "bfloat16")
    assert split_of(state, ranks) == Split(4, (3,))


def test_every_shard_is_of_one_rank() -> None:
    for tp_size in (1, 2, 4):
        for lcm in (0, 4, 8):
            splits = [
                split_of(POOL, RankInfo(tp_rank=rank, tp_size=tp_size, tp_lcm_size=lcm))
                for rank in range(tp_size)
            ]
            shards = [shard for split in splits for shard in split.mine]
            assert shards == list(range(splits[0].shards))


@pytest.mark.parametrize(
    ("engine", "ranks", "told"),
    [
        ({"salted_keys": False}, {}, "a request's cache_salt or extra_key, as those of SGLang 1"),
        ({}, {"cp_size": 2}, "attention context parallelism 2"),
        ({}, {"dcp_size": 2}, "decode context parallelism 2"),
        ({"speculation": "EAGLE3"}, {}, "speculative decoding by EAGLE3"),
        ({"ranks_of_host": 4}, {"tp_size": 8}, "8, 4 a host"),
    ],
)
def test_engine_that_cannot_be_served_is_refused_with_what_is(
    engine: dict[str, Any], ranks: dict[str, Any], told: str
) -> None:
    with pytest.raises(kvw.UsageError) as caught:
        check_engine(EngineInfo("1", **engine), RankInfo(**ranks))
    assert caught.value.code == "unsupported"
    assert told in str(caught.value)
    assert "; served: " in str(caught.value)


def test_engines_that_are_served_are_not_refused() -> None:
    check_engine(EngineInfo("1", speculation="NGRAM"), RankInfo(tp_size=8))
    check_engine(EngineInfo("1", ranks_of_host=8), RankInfo(tp_size=8, pp_size=2))
    check_pool(POOL, RankInfo(tp_size=2, tp_lcm_size=2))


@pytest.mark.parametrize(
    ("pool", "ranks", "told"),
    [
        ({"kind": "", "type_name": "NewPool"}, {}, "NewPool"),
        ({"problem": "keeps no bytes"}, {}, "which keeps no bytes"),
        ({}, {"latent": True, "tp_size": 2}, "beside a latent cache"),
        ({}, {"tp_lcm_size": 2}, "in layout page_first"),
        ({"layout": "page_head", "heads": 3}, {"tp_lcm_size": 2}, "heads of a rank 3"),
    ],
)
def test_pool_that_cannot_be_served_is_refused_with_what_is(
    pool: dict[str, Any], ranks: dict[str, Any], told: str
) -> None:
    facts = {
        "kind": "mha", "type_name": "MHA", "layout": "page_first", "heads": 4, "problem": "", **pool
    }  # fmt: skip
    with pytest.raises(kvw.UsageError) as caught:
        check_pool(PoolInfo("kv", page_tokens=64, dtype="bfloat16", **facts), RankInfo(**ranks))
    assert caught.value.code == "unsupported"
    assert told in str(caught.value)


def test_weights_that_nothing_names_refuse_the_start(tmp_path: Any) -> None:
    engine = EngineInfo("1", problem="load_format is dummy")
    with pytest.raises(kvw.UsageError, match=r"dummy.*Set kvwarehouse\.weights in hicache-storage"):
        weights_of(engine, Settings())
    with pytest.raises(kvw.UsageError, match=r"Set kvwarehouse\.weights"):
        weights_of(EngineInfo("1"), Settings())
    assert weights_of(engine, Settings(weights="mine")) == "mine"
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    found = weights_of(EngineInfo("1", checkpoint=str(tmp_path)), Settings())
    assert found == kvw.fingerprint(tmp_path)


def test_what_is_computed_with_beside_the_checkpoint_is_of_the_weights(tmp_path: Any) -> None:
    """Incident: engines with one model and other experts for the CPU shared pages."""
    model, experts = tmp_path / "model.bin", tmp_path / "experts.bin"
    model.write_bytes(b"model")

    def found(**more: str) -> str:
        return weights_of(EngineInfo("1", checkpoint=str(model), more_checkpoints=more), Settings())

    names = [found()]
    for content in (b"one", b"two"):
        experts.write_bytes(content)
        names += [found(kt_weight_path=str(experts)), found(restore_path=str(experts))]
        assert found(kt_weight_path=str(experts)) == names[-2]
    assert len(set(names)) == len(names)
    with pytest.raises(kvw.UsageError, match=r"/gone is not a path.*Set kvwarehouse\.weights"):
        found(kt_weight_path="/gone")


def test_an_adapter_with_other_weights_is_another_namespace(tmp_path: Any) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"one")
    engine = EngineInfo("1", adapters={"a": str(tmp_path)})
    first = adapters_of(engine, Settings())
    assert adapters_of(EngineInfo("1"), Settings()) == ""
    assert adapters_of(engine, Settings()) == first
    (tmp_path / "adapter_model.bin").write_bytes(b"two")
    assert adapters_of(engine, Settings()) != first


def test_an_adapter_that_is_in_no_file_refuses_the_start() -> None:
    """Incident: of a name on the hub the name alone counted, whatever the adapter's weights."""
    engine = EngineInfo("1", adapters={"a": "org/adapter-that-nobody-has"})
    with pytest.raises(kvw.UsageError, match=r"org/adapter-.*Set kvwarehouse\.weights"):
        adapters_of(engine, Settings())
    assert adapters_of(engine, Settings(weights="mine"))


def test_whatever_a_page_depends_on_makes_another_namespace() -> None:
    def made(**changed: Any) -> bytes:
        engine = EngineInfo(
            changed.pop("version", "1"),
            model=changed.pop("model", "m"),
            config=changed.pop("config", {"dtype": "auto"}),
        )
        ranks = RankInfo(**changed.pop("ranks", {}))
        page = PageBytes(changed.pop("size", 4096), changed.pop("order", "flat:4096"))
        identity = Identity(
            engine,
            ranks,
            changed.pop("weights", "w"),
            changed.pop("adapters", ""),
            changed.pop("salt", ""),
        )
        facts = {
            "name": "kv", "kind": "mha", "type_name": "MHA", "layout": "page_first",
            "page_tokens": 64, "dtype": "bfloat16", "shape": {"layers": "2"}, "heads": 8, **changed,
        }  # fmt: skip
        pool = PoolInfo(**facts)
        return identity.namespace(pool, split_of(pool, ranks), page).id

    changes: list[dict[str, Any]] = [
        {"version": "2"}, {"model": "n"}, {"config": {"dtype": "half"}}, {"ranks": {"tp_size": 2}},
        {"ranks": {"pp_size": 2}}, {"ranks": {"pp_size": 2, "pp_rank": 1}}, {"size": 8192},
        {"order": "pieces:4096"}, {"weights": "v"}, {"adapters": "a"},
        {"salt": "s"}, {"name": "swa"}, {"type_name": "MLA"}, {"layout": "layer_first"},
        {"page_tokens": 32}, {"dtype": "float16"}, {"shape": {"layers": "3"}}, {"heads": 4},
    ]  # fmt: skip
    found = [made(), *(made(**dict(change)) for change in changes)]
    assert len(set(found)) == len(found)
    assert made() == found[0]


def test_counts_add_up_and_calls_are_taken_once() -> None:
    counts = Counts()
    counts.why("dropped", {"full": 2, "late": 1})
    counts.why("dropped", {"full": 1})
    counts.why("missed", {})
    counts.loaded(4, 1 << 30, 0.5)
    counts.stored(2, 1 << 29, 0.5)
    totals = counts.totals()
    assert totals["dropped_pages"] == 4
    assert totals["dropped.full"] == 3
    assert "missed_pages" not in totals
    loads, stores = counts.take_calls()
    assert (list(loads.pages), list(loads.rates)) == ([4], [2.0])
    assert (list(stores.pages), list(stores.rates)) == ([2], [1.0])
    assert list(counts.take_calls()[0].pages) == []
    assert counts.totals()["loaded_pages"] == 4

"""Two tensor-parallel ranks, each with SGLang's controller in a process of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from kvwarehouse.testing.serving import Serving
from sglang_rig.engine import config, prompt
from sglang_rig.pools import PAGE, Shape, content, fill
from sglang_rig.ranks import Ranks


def extra(serving: Serving, salt: str, **more: Any) -> dict[str, Any]:
    return config(serving.address, **{"kvwarehouse.salt": salt, **more})


def test_a_prompt_is_there_when_both_ranks_stored_their_part_and_each_gets_its_own(
    shared: Serving, tmp_path: Path, seed: int
) -> None:
    seed %= 1 << 30
    with Ranks(tmp_path, 2, {"layout": "page_first"}, extra(shared, "two")) as ranks:
        first = ranks.one(0, do="store", prompt=seed, pages=4, seed=seed)
        assert [one["hit"] for one in ranks.all(do="prefetch", prompt=seed, pages=4)] == [0, 0]
        second = ranks.one(1, do="store", prompt=seed, pages=4, seed=seed + 1)
        assert first["pages"] != second["pages"]
        back = ranks.all(do="prefetch", prompt=seed, pages=4)
        assert [one["tokens"] for one in back] == [4 * PAGE] * 2
        assert [one["pages"] for one in back] == [first["pages"], second["pages"]]


def test_ranks_that_lost_different_pages_agree_on_what_all_have(
    shared: Serving, tmp_path: Path, seed: int
) -> None:
    """SGLang takes the least of what its ranks found."""
    seed %= 1 << 30
    with Ranks(tmp_path, 2, {"layout": "page_first"}, extra(shared, "lost")) as ranks:
        ranks.one(0, do="store", prompt=seed, pages=6, seed=seed)
        ranks.one(1, do="store", prompt=seed, pages=3, seed=seed)
        back = ranks.all(do="prefetch", prompt=seed, pages=6)
        assert [one["hit"] for one in back] == [0, 0] or [one["tokens"] for one in back] == [
            3 * PAGE
        ] * 2


def test_the_latent_cache_is_stored_by_the_first_rank_and_read_by_all(
    shared: Serving, tmp_path: Path, seed: int
) -> None:
    seed %= 1 << 30
    shape = {"layout": "page_first", "kind": "mla"}
    with Ranks(tmp_path, 2, shape, extra(shared, "latent")) as ranks:
        written, skipped = ranks.all(do="store", prompt=seed, pages=4, seed=seed)
        assert (written["stored"], skipped["stored"]) == (4 * PAGE, 0)
        for back in ranks.all(do="prefetch", prompt=seed, pages=4):
            assert back["pages"] == written["pages"]


def test_pages_cut_by_heads_serve_one_rank_and_two(
    start: Any, shared: Serving, tmp_path: Path, seed: int
) -> None:
    """What one rank stored two read, each its heads; what two stored one reads."""
    seed %= 1 << 30
    whole = Shape("page_head", heads=4)
    engine = start(shared.address, whole, tp_lcm_size=2, **{"kvwarehouse.salt": "cut"})
    assert engine.controller.storage_config.should_split_heads
    halves = {"layout": "page_head", "heads": 2}
    with Ranks(tmp_path, 2, halves, extra(shared, "cut", tp_lcm_size=2)) as ranks:
        _, pages = engine.store(prompt(seed, 4), seed)
        back = ranks.all(do="prefetch", prompt=seed, pages=4)
        assert [one["pages"] for one in back] == [halves_of(pages, rank) for rank in (0, 1)]
        stored = [ranks.one(r, do="store", prompt=seed + 1, pages=4, seed=seed + r) for r in (0, 1)]
        found = engine.prefetch(prompt(seed + 1, 4)).pages
        assert [halves_of(found, rank) for rank in (0, 1)] == [one["pages"] for one in stored]


def halves_of(pages: list[bytes], rank: int) -> list[str]:
    """Of SGLang's flat pages in page_head, (K and V, 1, heads, ...): the heads of one of two
    ranks."""
    found = []
    for page in pages:
        tensor = torch.frombuffer(bytearray(page), dtype=torch.uint8).view(2, 1, 4, -1)
        part = tensor[:, :, 2 * rank : 2 * rank + 2].contiguous()
        found.append(hashlib.sha256(part.numpy().tobytes()).hexdigest())
    return found


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_without_a_common_cut_one_ranks_pages_are_no_others(
    start: Any, shared: Serving, tmp_path: Path, seed: int, layout: str
) -> None:
    seed %= 1 << 30
    engine = start(shared.address, Shape(layout, heads=4), **{"kvwarehouse.salt": layout})
    engine.store(prompt(seed, 4), seed)
    halves = {"layout": layout, "heads": 2}
    with Ranks(tmp_path, 2, halves, extra(shared, layout)) as ranks:
        assert [one["hit"] for one in ranks.all(do="prefetch", prompt=seed, pages=4)] == [0, 0]


def test_the_heads_of_a_page_are_where_this_test_thinks(start: Any, shared: Serving) -> None:
    engine = start(shared.address, Shape("page_head", heads=4))
    slots = engine.host.alloc(PAGE)
    fill(engine.host, 3)
    (page,) = content(engine.host, slots)
    heads = engine.host.kv_buffer[:, int(slots[0]) // PAGE, 2:4].contiguous().view(-1)
    digest = hashlib.sha256(heads.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert halves_of([page], 1) == [digest]
    engine.host.free(slots)

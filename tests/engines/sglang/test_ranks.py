"""Two tensor-parallel ranks, each with SGLang's controller in a process of its own: it takes half a
minute to import SGLang there, so tests share them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvwarehouse_bench.harness.serving import Serving
from sglang_rig.engine import config, prompt
from sglang_rig.pools import PAGE, Shape, content, fill
from sglang_rig.ranks import Ranks

SALT = "ranks"
_CUT = {"kvwarehouse.salt": SALT, "tp_lcm_size": 2}


@pytest.fixture(scope="module")
def two(shared: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks with two of four heads each."""
    folder = tmp_path_factory.mktemp("two")
    with Ranks(
        folder, 2, {"layout": "page_head", "heads": 2}, config(shared.address, **_CUT)
    ) as it:
        yield it


@pytest.fixture
def number(seed: int) -> int:
    """A seed that JSON keeps as it is."""
    return seed % (1 << 30)


def test_a_prompt_is_there_when_both_ranks_stored_their_part_and_each_gets_its_own(
    two: Ranks, number: int
) -> None:
    first = two.one(0, do="store", prompt=number, pages=4, seed=number)
    assert [one["hit"] for one in two.all(do="prefetch", prompt=number, pages=4)] == [0, 0]
    second = two.one(1, do="store", prompt=number, pages=4, seed=number + 1)
    assert first["pages"] != second["pages"]
    back = two.all(do="prefetch", prompt=number, pages=4)
    assert [one["tokens"] for one in back] == [4 * PAGE] * 2
    assert [one["pages"] for one in back] == [first["pages"], second["pages"]]


def test_of_what_one_rank_lacks_no_rank_has_anything(two: Ranks, number: int) -> None:
    """The same prompt, of which the second rank stored the first pages alone."""
    first = two.one(0, do="store", prompt=number, pages=6, seed=number)
    second = two.one(1, do="store", prompt=number, of=6, pages=3, seed=number)
    back = two.all(do="prefetch", prompt=number, pages=6)
    assert [one["tokens"] for one in back] == [3 * PAGE] * 2
    assert [one["pages"] for one in back] == [first["pages"][:3], second["pages"]]


def test_pages_cut_by_heads_serve_one_rank_and_two(
    start: Any, shared: Serving, two: Ranks, number: int
) -> None:
    """What one rank stored two read, each its heads; what two stored one reads."""
    engine = start(shared.address, Shape("page_head", heads=4), **_CUT)
    assert engine.controller.storage_config.should_split_heads
    _, pages = engine.store(prompt(number, 4), number)
    back = two.all(do="prefetch", prompt=number, pages=4)
    assert [one["pages"] for one in back] == [halves_of(pages, rank) for rank in (0, 1)]
    orders = [{"do": "store", "prompt": number + 1, "pages": 4, "seed": number + r} for r in (0, 1)]
    stored = two.each(*orders)
    found = engine.prefetch(prompt(number + 1, 4)).pages
    assert [halves_of(found, rank) for rank in (0, 1)] == [one["pages"] for one in stored]


def test_without_a_common_cut_one_ranks_pages_are_no_others(
    start: Any, shared: Serving, two: Ranks, number: int
) -> None:
    engine = start(shared.address, Shape("page_head", heads=4), **{"kvwarehouse.salt": SALT})
    engine.store(prompt(number, 4), number)
    assert [one["hit"] for one in two.all(do="prefetch", prompt=number, pages=4)] == [0, 0]


def test_the_latent_cache_is_stored_by_the_first_rank_and_read_by_all(
    shared: Serving, tmp_path_factory: pytest.TempPathFactory, number: int
) -> None:
    shape, folder = {"layout": "page_first", "kind": "mla"}, tmp_path_factory.mktemp("latent")
    with Ranks(folder, 2, shape, config(shared.address, **{"kvwarehouse.salt": SALT})) as ranks:
        written, skipped = ranks.all(do="store", prompt=number, pages=4, seed=number)
        assert (written["stored"], skipped["stored"]) == (4 * PAGE, 0)
        for back in ranks.all(do="prefetch", prompt=number, pages=4):
            assert back["pages"] == written["pages"]


def halves_of(pages: list[bytes], rank: int) -> list[str]:
    """Of SGLang's flat pages in page_head, (K and V, 1, heads, ...): the heads of one of two
    ranks."""
    found = []
    for page in pages:
        tensor = torch.frombuffer(bytearray(page), dtype=torch.uint8).view(2, 1, 4, -1)
        part = tensor[:, :, 2 * rank : 2 * rank + 2].contiguous()
        found.append(hashlib.sha256(part.numpy().tobytes()).hexdigest())
    return found


def test_the_heads_of_a_page_are_where_this_test_thinks(start: Any, shared: Serving) -> None:
    engine = start(shared.address, Shape("page_head", heads=4))
    slots = engine.host.alloc(PAGE)
    fill(engine.host, 3)
    (page,) = content(engine.host, slots)
    heads = engine.host.kv_buffer[:, int(slots[0]) // PAGE, 2:4].contiguous().view(-1)
    digest = hashlib.sha256(heads.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert halves_of([page], 1) == [digest]
    engine.host.free(slots)

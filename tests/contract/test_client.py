"""The contract that every data path of the client keeps: what is loaded is what was stored."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse import Client, Namespace, OpenNamespace, Regions, UsageError
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse_bench.harness.eventually import DEADLINE_S

TOKENS = list(range(100, 140))
PAGE_TOKENS = 4
PAGE_BYTES = 4096


def empty(pages: int, page_bytes: int = PAGE_BYTES) -> Any:
    return np.zeros((pages, page_bytes), np.uint8)


def test_load_returns_the_bytes_that_were_stored(ns: OpenNamespace, pages: Any) -> None:
    result = ns.store(TOKENS, pages)
    assert (result.stored, result.already, result.dropped) == (10, 0, {})
    out = empty(10)
    assert ns.load(TOKENS, out) == 10
    assert np.array_equal(out, pages)


def test_lookup_finds_what_was_stored_and_says_where(ns: OpenNamespace, pages: Any) -> None:
    assert ns.lookup(TOKENS).pages == 0
    ns.store(TOKENS, pages)
    match = ns.lookup(TOKENS)
    assert (match.pages, match.tokens) == (10, 40)
    assert match.by_tier == {"hbm": 0, "dram": 10, "nvme": 0, "remote": 0}


def test_lookup_finds_the_prefix_that_two_prompts_share(ns: OpenNamespace, pages: Any) -> None:
    ns.store(TOKENS, pages)
    other = [*TOKENS[:18], 7, *TOKENS[19:]]
    assert ns.lookup(other).pages == 4
    assert ns.lookup(TOKENS + TOKENS).pages == 10
    assert ns.lookup(TOKENS[1:]).pages == 0
    assert ns.lookup([7, *TOKENS[1:]]).pages == 0


def test_load_fills_the_longest_stored_prefix_and_says_why_not_more(
    ns: OpenNamespace, pages: Any
) -> None:
    ns.store(TOKENS[:12], pages[:3])
    out = empty(10)
    filled = ns.load(TOKENS, out)
    assert filled == 3
    assert np.array_equal(out[:3], pages[:3])
    assert sum(filled.missed.values()) == 7


def test_tokens_after_the_last_whole_page_do_not_count(ns: OpenNamespace, pages: Any) -> None:
    assert ns.store(TOKENS[:11], pages[:2]).stored == 2
    assert ns.lookup(TOKENS[:11]).tokens == 8
    assert ns.load(TOKENS[:11], empty(5)) == 2


@pytest.mark.parametrize("tokens", [[], TOKENS[:3]])
def test_prompt_without_a_whole_page_is_a_miss(ns: OpenNamespace, tokens: list[int]) -> None:
    assert ns.lookup(tokens).pages == 0
    assert ns.load(tokens, empty(1)) == 0
    assert ns.store(tokens, empty(0)).stored == 0


def test_load_fills_no_more_rows_than_there_are(ns: OpenNamespace, pages: Any) -> None:
    ns.store(TOKENS, pages)
    out = empty(3)
    assert ns.load(TOKENS, out) == 3
    assert np.array_equal(out, pages[:3])
    assert ns.load(TOKENS, empty(0)) == 0


def test_load_leaves_rows_beyond_the_prompt_alone(ns: OpenNamespace, pages: Any) -> None:
    ns.store(TOKENS[:8], pages[:2])
    out = empty(4)
    assert ns.load(TOKENS[:8], out) == 2
    assert not out[2:].any()


def test_store_of_stored_pages_changes_nothing(ns: OpenNamespace, pages: Any) -> None:
    ns.store(TOKENS, pages)
    again = ns.store(TOKENS, pages[::-1].copy())
    assert (again.stored, again.already, again.dropped) == (0, 10, {})
    out = empty(10)
    ns.load(TOKENS, out)
    assert np.array_equal(out, pages)


def test_store_adds_the_pages_that_are_missing(ns: OpenNamespace, pages: Any) -> None:
    ns.store(TOKENS[:12], pages[:3])
    result = ns.store(TOKENS, pages)
    assert (result.stored, result.already) == (7, 3)


def test_window_of_a_prompt_is_stored_and_loaded_from_first(ns: OpenNamespace, pages: Any) -> None:
    ns.store(TOKENS[:16], pages[:4])
    assert ns.store(TOKENS[:32], pages[4:8], first=4).stored == 4
    out = empty(3)
    assert ns.load(TOKENS, out, first=5) == 3
    assert np.array_equal(out, pages[5:8])
    assert ns.load(TOKENS, out, first=8) == 0
    assert ns.load(TOKENS, out, first=10) == 0


def test_pages_are_found_by_an_engines_own_keys(ns: OpenNamespace, pages: Any) -> None:
    keys = [bytes([n]) * 32 for n in range(10)]
    assert ns.store(pages=pages, keys=keys).stored == 10
    assert ns.lookup(keys=keys).tokens == 40
    assert ns.lookup(keys=[*keys[:4], b"other"]).pages == 4
    out = empty(10)
    assert ns.load(out=out, keys=keys) == 10
    assert np.array_equal(out, pages)


@pytest.mark.parametrize("field", ["model", "weights", "dtype", "layout", "salt", "adapter"])
def test_page_of_one_namespace_is_a_miss_in_another(
    client: Client, space: Namespace, pages: Any, field: str
) -> None:
    client.open(space).store(TOKENS, pages)
    other = client.open(dataclasses.replace(space, **{field: getattr(space, field) + "x"}))
    assert other.lookup(TOKENS).pages == 0
    assert other.load(TOKENS, empty(10)) == 0


def test_page_matches_once_all_its_shards_are_stored(
    client: Client, space: Namespace, pages: Any
) -> None:
    ns = client.open(dataclasses.replace(space, shards=2))
    ns.store(TOKENS, pages, shard=1)
    assert ns.lookup(TOKENS).pages == 0
    ns.store(TOKENS, pages[::-1].copy(), shard=0)
    assert ns.lookup(TOKENS).pages == 10
    out = empty(10)
    assert ns.load(TOKENS, out, shard=1) == 10
    assert np.array_equal(out, pages)
    assert ns.load(TOKENS, out, shard=0) == 10
    assert np.array_equal(out, pages[::-1])


@pytest.mark.parametrize("page_bytes", [1, 4095, 4097, 1_048_577, 3_000_001])
def test_pages_of_any_size_come_back_whole(
    client: Client, space: Namespace, seed: int, page_bytes: int
) -> None:
    ns = client.open(dataclasses.replace(space, page_bytes=page_bytes))
    pages = np.random.default_rng(seed).integers(0, 256, (5, page_bytes), dtype=np.uint8)
    assert ns.store(TOKENS[:20], pages).stored == 5
    out = empty(5, page_bytes)
    assert ns.load(TOKENS[:20], out) == 5
    assert np.array_equal(out, pages)


def test_pages_are_gathered_from_and_scattered_to_pieces(
    client: Client, space: Namespace, seed: int
) -> None:
    ns = client.open(space)
    noise = np.random.default_rng(seed)
    layers = [noise.integers(0, 256, (8, 1024), dtype=np.uint8) for _ in range(2)]
    before = [layer.copy() for layer in layers]
    blocks = [[3, 1], [0, 6], [7, 2]]
    regions = Regions.strided(
        layers, [layer.ctypes.data for layer in layers], [1024, 1024], [1024, 1024], blocks
    )
    assert ns.store(TOKENS[:12], regions).stored == 3
    rows = empty(3)
    assert ns.load(TOKENS[:12], rows) == 3
    first = [before[0][3], before[1][3], before[0][1], before[1][1]]
    assert rows[0].tobytes() == b"".join(piece.tobytes() for piece in first)
    for layer in layers:
        layer[:] = 0
    assert ns.load(TOKENS[:12], regions) == 3
    for layer, old in zip(layers, before, strict=True):
        used = [block for page in blocks for block in page]
        assert np.array_equal(layer[used], old[used])
        assert not np.delete(layer, used, axis=0).any()


def test_load_into_regions_is_refused_when_they_are_not_writable(
    ns: OpenNamespace, pages: Any
) -> None:
    """Over gRPC it overwrote the array that the caller had protected, or was a TypeError."""
    given = Regions.rows(pages, writable=False)
    assert ns.store(TOKENS, given).stored == 10
    frozen = empty(10)
    frozen.flags.writeable = False
    kept = empty(10)
    for array in (frozen, kept):
        with pytest.raises(UsageError, match="read-only") as caught:
            ns.load(TOKENS, Regions.rows(array, writable=False))
        assert caught.value.code == "read_only_buffer"
        assert np.array_equal(array, empty(10))


@pytest.mark.parametrize(
    "tokens", [tuple(TOKENS), range(100, 140), np.array(TOKENS), np.array(TOKENS, np.uint16)]
)
def test_tokens_are_the_same_whatever_holds_them(
    ns: OpenNamespace, pages: Any, tokens: Any
) -> None:
    ns.store(TOKENS, pages)
    assert ns.lookup(tokens).pages == 10


def test_another_client_sees_what_one_stored(
    ns: OpenNamespace, another: Client, space: Namespace, pages: Any
) -> None:
    ns.store(TOKENS, pages)
    out = empty(10)
    assert another.open(space).load(TOKENS, out) == 10
    assert np.array_equal(out, pages)


def test_clear_makes_every_page_a_miss(
    client: Client, ns: OpenNamespace, space: Namespace, pages: Any
) -> None:
    ns.store(TOKENS, pages)
    assert client.clear(space) == 10
    assert ns.lookup(TOKENS).pages == 0
    assert ns.load(TOKENS, empty(10)) == 0
    assert ns.store(TOKENS, pages).stored == 10


def test_store_of_pages_that_are_older_than_a_clear_is_dropped(
    client: Client, ns: OpenNamespace, pages: Any
) -> None:
    def epoch() -> int:
        return next(each.clear_epoch for each in client.namespaces() if each.id == ns.space.id)

    before = epoch()
    assert ns.store(TOKENS[:20], pages[:5], since_epoch=before).stored == 5
    client.clear(ns)
    late = ns.store(TOKENS, pages, since_epoch=before)
    assert (late.stored, late.already) == (0, 0)
    assert late.dropped == {"cleared": 1, "refused_tail": 9}
    assert ns.lookup(TOKENS).pages == 0
    assert ns.store(TOKENS, pages, since_epoch=epoch()).stored == 10


def test_clear_of_everything_is_said_in_words(
    client: Client, ns: OpenNamespace, space: Namespace, pages: Any
) -> None:
    """Incident: clear(spaces.get("old")), of a name that was not there, removed every page."""
    ns.store(TOKENS, pages)
    for given in ({"space": None}, {"space": None, "all": False}, {"space": space, "all": True}):
        with pytest.raises(UsageError, match="all=True") as caught:
            client.clear(**given)
        assert caught.value.code == "no_target"
    assert ns.lookup(TOKENS).pages == 10
    assert client.clear(all=True) >= 10
    assert ns.lookup(TOKENS).pages == 0


def test_calls_take_a_namespace_and_nothing_else(
    client: Client, ns: OpenNamespace, pages: Any
) -> None:
    ns.store(TOKENS, pages)
    assert len(list(client.pages(ns))) == 10
    assert list(client.check(ns))[-1].checked >= 10
    assert client.evict(ns, 1, "all") == 1
    assert client.clear(ns) == 9
    for wrong in ("model", ns.space.id[:8], ns.space.id.hex(), 7):
        for call in (
            lambda wrong=wrong: client.clear(wrong),
            lambda wrong=wrong: client.evict(wrong, 1),
            lambda wrong=wrong: client.miss_ratio(wrong),
            lambda wrong=wrong: client.why(TOKENS, space=wrong),
            lambda wrong=wrong: list(client.pages(wrong)),
            lambda wrong=wrong: list(client.check(wrong)),
            lambda wrong=wrong: next(iter(client.watch(wrong))),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.code == "bad_namespace"


def test_load_without_time_fills_what_is_in_dram(ns: OpenNamespace, pages: Any) -> None:
    ns.store(TOKENS, pages)
    assert ns.load(TOKENS, empty(10), timeout_s=0) == 10


def listed(client: Client, space: Namespace) -> StoredNamespace:
    (found,) = (each for each in client.namespaces() if each.id == space.id)
    return found


def test_namespace_is_listed_with_its_fields_once_it_is_open(client: Client) -> None:
    space = Namespace(
        model="unsalted", weights="w", dtype="f", layout="l/1", page_tokens=1, page_bytes=4096
    )
    client.open(space)
    assert listed(client, space).fields == space.to_fields()
    assert listed(client, space).space == space


def test_namespace_is_listed_with_a_digest_of_its_salt(
    client: Client, ns: OpenNamespace, space: Namespace
) -> None:
    found = listed(client, space)
    assert found.fields == space.shown_fields()
    assert space.salt not in repr(found)
    with pytest.raises(UsageError, match="salt") as caught:
        _ = found.space
    assert caught.value.code == "salted"


def test_namespace_is_named_as_it_is_listed_or_by_its_id(
    client: Client, ns: OpenNamespace, space: Namespace, pages: Any
) -> None:
    ns.store(TOKENS, pages)
    for named in (listed(client, space), space.id):
        assert len(list(client.pages(named))) == 10
        assert [progress.done for progress in client.check(named)][-1]
    assert client.clear(listed(client, space)) == 10
    ns.store(TOKENS, pages)
    assert client.clear(space.id) == 10


def test_pages_of_a_namespace_are_listed(
    client: Client, ns: OpenNamespace, space: Namespace, pages: Any
) -> None:
    ns.store(TOKENS, pages)
    listed = list(client.pages(space))
    assert len({page.key for page in listed}) == 10
    assert sorted(page.position for page in listed) == list(range(10))


def test_flush_returns_within_its_time(client: Client, ns: OpenNamespace, pages: Any) -> None:
    ns.store(TOKENS, pages)
    assert client.flush(timeout_s=60).pending == 0


def test_status_counts_the_pages_that_are_stored(
    client: Client, ns: OpenNamespace, pages: Any
) -> None:
    before = client.status()["core"]["index"]["pages"]
    ns.store(TOKENS, pages)
    assert client.status()["core"]["index"]["pages"] == before + 10


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda ns: ns.lookup([1, -1]), "bad_tokens"),
        (lambda ns: ns.lookup([1.5]), "bad_tokens"),
        (lambda ns: ns.lookup(), "bad_prefix"),
        (lambda ns: ns.lookup([1], keys=[b"x"]), "bad_prefix"),
        (lambda ns: ns.lookup(keys=[b""]), "bad_key"),
        (lambda ns: ns.lookup(np.zeros(2**20 + 1, np.uint32)), "too_many_tokens"),
        (lambda ns: ns.lookup(keys=[b"x"] * (2**16 + 1)), "too_many_keys"),
        (lambda ns: ns.load(TOKENS), "bad_pages"),
        (lambda ns: ns.load(TOKENS, empty(1, 5)), "bad_pages"),
        (lambda ns: ns.load(TOKENS, np.zeros((1, PAGE_BYTES), np.int32)), "bad_pages"),
        (lambda ns: ns.load(TOKENS, bytes(PAGE_BYTES)), "bad_pages"),
        (lambda ns: ns.load(TOKENS, empty(2)[::-1]), "bad_pages"),
        (lambda ns: ns.load(TOKENS, empty(1), shard=1), "bad_shard"),
        (lambda ns: ns.load(TOKENS, empty(1), shard=-1), "bad_shard"),
        (lambda ns: ns.load(TOKENS, empty(1), shard="0"), "bad_shard"),
        (lambda ns: ns.load(TOKENS, empty(1), timeout_s=-1), "bad_timeout"),
        (lambda ns: ns.load(TOKENS, empty(1), timeout_s=float("inf")), "bad_timeout"),
        (lambda ns: ns.load(TOKENS, empty(1), timeout_s="x"), "bad_timeout"),
        (lambda ns: ns.load(TOKENS, empty(1), first=11), "bad_first"),
        (lambda ns: ns.load(TOKENS, empty(1), first=True), "bad_first"),
        (lambda ns: ns.store(TOKENS, empty(9)), "bad_pages"),
        (lambda ns: ns.store(TOKENS, empty(11)), "bad_pages"),
        (lambda ns: ns.store(TOKENS, empty(10), first=1), "bad_pages"),
        (lambda ns: ns.store(TOKENS), "bad_pages"),
        (lambda ns: ns.store(keys=[b"x"], pages=empty(2)), "bad_pages"),
        (lambda ns: ns.store(TOKENS, empty(10), since_epoch=-1), "bad_since_epoch"),
        (lambda ns: ns.store(TOKENS, empty(10), since_epoch=2**64), "bad_since_epoch"),
    ],
)
def test_bad_input_is_refused_and_the_client_goes_on(
    ns: OpenNamespace, pages: Any, call: Any, code: str
) -> None:
    with pytest.raises(UsageError) as caught:
        call(ns)
    assert caught.value.code == code
    assert ns.store(TOKENS, pages).stored == 10


def test_page_that_fits_no_slab_is_refused_when_the_namespace_is_opened(
    client: Client, space: Namespace
) -> None:
    with pytest.raises(UsageError, match="slab"):
        client.open(dataclasses.replace(space, page_bytes=1 << 30, shards=64))


def test_open_takes_a_namespace_and_nothing_else(client: Client) -> None:
    with pytest.raises(UsageError, match="Namespace"):
        client.open("model")  # type: ignore[arg-type]


def test_closed_client_refuses_every_call(
    client: Client, ns: OpenNamespace, space: Namespace
) -> None:
    client.close()
    client.close()
    for call in (client.status, lambda: client.open(space), lambda: ns.lookup(TOKENS)):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.code == "closed"


def test_pages_in_device_memory_are_refused_where_memory_is_not_shared(
    client: Client, ns: OpenNamespace, pages: Any
) -> None:
    if client.local:
        return
    ns.store(TOKENS, pages)
    blocks = np.arange(10).reshape(-1, 1)
    regions = Regions.strided([pages], [pages.ctypes.data], [4096], [4096], blocks).on_device(0)
    for call in (lambda: ns.store(TOKENS, regions), lambda: ns.load(TOKENS, regions)):
        with pytest.raises(UsageError, match="host memory") as caught:
            call()
        assert caught.value.code == "unsupported"


@pytest.fixture
def at_one_socket(tmp_path: Path) -> Callable[[str], PrivateDaemon]:
    """Makes a daemon that knows nothing, for the place of the one before."""
    return lambda dram: PrivateDaemon({"socket": str(tmp_path / "kvw.sock"), "dram": dram})


def test_refresh_registers_all_others_when_the_new_daemon_refuses_a_namespace(
    at_one_socket: Callable[[str], PrivateDaemon],
    connected: Callable[[str, str], Client],
    space: Namespace,
) -> None:
    large = dataclasses.replace(space, page_bytes=8 << 20)
    with ExitStack() as until_the_end:
        with at_one_socket("64MiB") as daemon:
            client = until_the_end.enter_context(connected("local", daemon.address))
            held = [client.open(large), client.open(space)]
        until_the_end.enter_context(at_one_socket("16MiB"))  # its slabs are smaller
        for _ in range(2):
            with pytest.raises(UsageError) as refused:
                client.refresh(timeout_s=DEADLINE_S)
            assert refused.value.code == "page_too_large"
            assert [each.id for each in client.namespaces()] == [space.id]
        assert len(held) == 2


def test_refresh_registers_what_is_held_open_and_not_what_was_forgotten_or_let_go(
    at_one_socket: Callable[[str], PrivateDaemon],
    connected: Callable[[str, str], Client],
    space: Namespace,
) -> None:
    kept, forgotten, let_go = (dataclasses.replace(space, salt=f"{n}") for n in range(3))
    with ExitStack() as until_the_end:
        with at_one_socket("64MiB") as daemon:
            client = until_the_end.enter_context(connected("local", daemon.address))
            held = [client.open(kept), client.open(kept), client.open(forgotten)]
            client.open(let_go)
            held.pop(0)  # one of two
            client.clear(forgotten, forget=True)
        gc.collect()
        with at_one_socket("64MiB"):
            assert client.refresh(timeout_s=DEADLINE_S)
            assert [each.id for each in client.namespaces()] == [kept.id]
            client.clear(all=True, forget=True)
        with at_one_socket("64MiB"):
            assert client.refresh(timeout_s=DEADLINE_S)
            assert client.namespaces() == []
            assert len(held) == 2


def test_pins_hold_what_is_stored_where_memory_is_shared(
    client: Client, ns: OpenNamespace, pages: Any
) -> None:
    ns.store(TOKENS, pages)
    if not client.local:
        with pytest.raises(UsageError, match="pins") as caught:
            ns.pin(TOKENS)
        assert caught.value.code == "unsupported"
        return
    with ns.pin(TOKENS) as pins:
        assert pins.pages == 10
    pins.release()
    assert ns.pin(TOKENS, first=8).pages == 2
    assert ns.pin([1, 2, 3, 4]).pages == 0

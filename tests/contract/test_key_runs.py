"""Parts of prompts by an engine's own keys: what a run stores is what a list finds, and the other
way round; what is refused in one run leaves the others alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvwarehouse import Client, KeyRun, Namespace, OpenNamespace, UsageError, connect, embedded

KEYS = [bytes([n]) * 32 for n in range(10)]
_WAIT_S = 60.0


@pytest.fixture
def path() -> str:
    return "local"


def empty(like: Any) -> Any:
    return np.zeros_like(like)


def noise(seed: int, pages: int, page_bytes: int = 4096) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (pages, page_bytes), dtype=np.uint8)


def check_loaded(ns: OpenNamespace, keys: Any, pages: Any) -> None:
    out = empty(pages)
    assert ns.load(keys=keys, out=out) == len(pages)
    assert np.array_equal(out, pages)


def test_pages_stored_by_runs_are_loaded_by_a_list(ns: OpenNamespace, pages: Any) -> None:
    for begin, end in ((0, 3), (3, 4), (4, 10)):
        run = KeyRun(KEYS[begin:end], begin, KEYS[begin - 1] if begin else None)
        assert ns.store(keys=[run], pages=pages[begin:end]).stored == end - begin
    assert ns.lookup(keys=KEYS).pages == 10
    check_loaded(ns, KEYS, pages)


def test_pages_stored_by_a_list_are_found_loaded_and_pinned_by_runs(
    ns: OpenNamespace, pages: Any
) -> None:
    ns.store(keys=KEYS, pages=pages)
    runs = [KeyRun(KEYS[6:], 6, KEYS[5]), KeyRun(KEYS[2:4], 2, KEYS[1]), KeyRun(KEYS[:1])]
    assert ns.lookup(keys=runs).pages == 7
    check_loaded(ns, runs, pages[[6, 7, 8, 9, 2, 3, 0]])
    with ns.pin(keys=runs) as pins:
        assert pins.pages == 7


def test_runs_of_one_call_may_build_on_each_other(ns: OpenNamespace, pages: Any) -> None:
    runs = [KeyRun(KEYS[:4]), KeyRun(KEYS[4:8], 4, KEYS[3]), KeyRun(KEYS[8:], 8, KEYS[7])]
    result = ns.store(keys=runs, pages=pages)
    assert (result.stored, result.already, result.dropped) == (10, 0, {})
    check_loaded(ns, KEYS, pages)


def test_page_at_another_place_than_it_was_stored_at_is_no_page(
    ns: OpenNamespace, pages: Any
) -> None:
    ns.store(keys=KEYS, pages=pages)
    out = empty(pages[:1])
    assert ns.load(keys=[KeyRun(KEYS[3:4], 3, KEYS[2])], out=out) == 1
    for run in (KeyRun(KEYS[3:4]), KeyRun(KEYS[3:4], 4, KEYS[2]), KeyRun(KEYS[3:4], 3, KEYS[1])):
        assert ns.load(keys=[run], out=out) == 0


def test_pages_that_stand_alone_are_stored_and_found_in_any_order(
    ns: OpenNamespace, pages: Any, rng: Any
) -> None:
    alone = [KeyRun([key]) for key in KEYS]
    result = ns.store(keys=alone, pages=pages)
    assert (result.stored, result.already, result.dropped) == (10, 0, {})
    order = rng.sample(range(10), 10)
    check_loaded(ns, [alone[n] for n in order], pages[order])
    assert ns.store(keys=alone[::-1], pages=pages).already == 10


def test_lookup_and_load_end_at_the_first_page_missing_of_all_runs(
    ns: OpenNamespace, pages: Any
) -> None:
    ns.store(keys=KEYS[:3], pages=pages[:3])
    ns.store(keys=[KeyRun([b"other"])], pages=pages[3:4])
    runs = [KeyRun(KEYS[:4]), KeyRun([b"other"])]
    assert ns.lookup(keys=runs).pages == 3
    out = empty(pages[:5])
    assert ns.load(keys=runs, out=out) == 3
    assert ns.load(keys=runs[::-1], out=out) == 4
    assert np.array_equal(out[:4], pages[[3, 0, 1, 2]])


def test_missing_parent_drops_its_run_and_no_other(ns: OpenNamespace, pages: Any) -> None:
    lost = KeyRun([b"x6", b"x7"], 6, b"never stored")
    runs = [KeyRun(KEYS[:3]), lost, KeyRun(KEYS[3:6], 3, KEYS[2]), KeyRun([b"alone"])]
    result = ns.store(keys=runs, pages=pages[:9])
    assert (result.stored, result.already) == (7, 0)
    assert result.dropped == {"parent_missing": 1, "refused_tail": 1}
    check_loaded(ns, [runs[0], runs[2], runs[3]], pages[[0, 1, 2, 5, 6, 7, 8]])
    assert ns.lookup(keys=[lost]).pages == 0


def test_dropped_pages_of_many_runs_add_up(ns: OpenNamespace, pages: Any) -> None:
    runs = [KeyRun([b"lost %d" % n], 1, b"never stored") for n in range(9)]
    result = ns.store(keys=[*runs, KeyRun(KEYS[:1])], pages=pages)
    assert (result.stored, result.dropped) == (1, {"parent_missing": 9})


def test_batch_of_pages_alone_is_stored_over_many_windows_and_messages(
    client: Client, space: Namespace, seed: int
) -> None:
    """More than a message holds of the longest keys, and many times the window of one exchange."""
    ns = client.open(space)
    count = 5000
    rng = np.random.default_rng(seed)
    keys = [rng.bytes(64) for _ in range(count)]
    alone = [KeyRun([key]) for key in keys]
    pages = noise(seed, count)
    half = slice(0, count, 2)
    every_other = np.ascontiguousarray(pages[half])
    result = ns.store(keys=alone[half], pages=every_other, timeout_s=_WAIT_S)
    assert result.stored == count / 2
    result = ns.store(keys=alone, pages=pages, timeout_s=_WAIT_S)
    assert (result.stored, result.already, result.dropped) == (count / 2, count / 2, {})
    check_loaded(ns, alone, pages)


def test_batch_of_long_and_short_runs_is_stored_whole(
    client: Client, space: Namespace, seed: int
) -> None:
    ns = client.open(space)
    rng = np.random.default_rng(seed)
    prompts = [[rng.bytes(32) for _ in range(int(rng.integers(1, 200)))] for _ in range(30)]
    runs = []
    for prompt in prompts:
        cut = int(rng.integers(0, len(prompt)))
        runs += [KeyRun(prompt[:cut])] if cut else []
        runs.append(KeyRun(prompt[cut:], cut, prompt[cut - 1] if cut else None))
    pages = noise(seed, sum(map(len, prompts)))
    assert ns.store(keys=runs, pages=pages, timeout_s=_WAIT_S).stored == len(pages)
    begin = 0
    for prompt in prompts:
        check_loaded(ns, prompt, pages[begin : begin + len(prompt)])
        begin += len(prompt)


@pytest.fixture(scope="module")
def small() -> Iterator[Client]:
    with embedded(dram="64MiB") as client:
        yield client


def test_full_arena_takes_what_fits_and_says_what_became_of_the_rest(
    small: Client, space: Namespace, seed: int
) -> None:
    """Half of it is pinned, and a page whose child is being stored cannot leave: a long run ends
    where there is no room. What comes behind it in the call is taken all the same.

    Room that is still being taken is waited for: on a machine that has just started and is busy,
    perhaps for longer than a store has by default."""
    page_bytes = 1 << 20
    wide = Namespace(**{**space.to_fields(), "page_bytes": page_bytes, "salt": "full"})
    ns = small.open(wide)
    held = [KeyRun([b"held %d" % n]) for n in range(32)]
    assert ns.store(keys=held, pages=noise(seed, 32, page_bytes), timeout_s=_WAIT_S).stored == 32
    runs = [KeyRun([b"%d %d" % (n, page) for page in range(60)]) for n in range(2)]
    runs[1:1] = [KeyRun([b"alone %d" % n]) for n in range(20)]
    pages = noise(seed + 1, 140, page_bytes)
    with ns.pin(keys=held) as pins:
        result = ns.store(keys=runs, pages=pages, timeout_s=_WAIT_S)
        assert result.stored + result.dropped_pages == 140
        assert result.dropped.get("no_room") == 2, result
        assert ns.lookup(keys=runs[1:21]).pages + ns.lookup(keys=runs[21:]).pages > 0
        assert pins.pages == 32
    begin = 0
    for run in runs:
        out = np.zeros((len(run.keys), page_bytes), np.uint8)
        filled = ns.load(keys=[run], out=out, timeout_s=0)
        assert np.array_equal(out[:filled], pages[begin : begin + filled])
        begin += len(run.keys)


@pytest.mark.concurrency
def test_clients_that_store_overlapping_runs_make_each_page_once(
    address: str, space: Namespace, seed: int
) -> None:
    keys = [b"shared %d" % n for n in range(600)]
    pages = noise(seed, 600)
    results: list[Any] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        try:
            with connect(address, timeout_s=_WAIT_S) as client:
                ns = client.open(space)
                for _ in range(10):
                    # Runs that overlap other clients' and each other, parents before children.
                    begins = sorted({0, *rng.integers(1, 600, 8).tolist()})
                    ends = [*begins[1:], 600]
                    runs = [
                        KeyRun(keys[begin:end], begin, keys[begin - 1] if begin else None)
                        for begin, end in zip(begins, ends, strict=True)
                    ]
                    result = ns.store(keys=runs, pages=pages, timeout_s=_WAIT_S)
                    assert result.stored + result.already + result.dropped_pages == 600
                    results.append(result)
        except BaseException as error:  # noqa: BLE001 - the thread's edge; raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert sum(result.stored for result in results) == 600
    with connect(address) as client:
        check_loaded(client.open(space), keys, pages)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda ns, pages: ns.lookup([1], keys=[KeyRun(KEYS)]), "bad_prefix"),
        (lambda ns, pages: ns.load(keys=[KeyRun(KEYS)], out=pages, first=1), "bad_first"),
        (lambda ns, pages: ns.store(keys=[KeyRun(KEYS)], pages=pages, first=1), "bad_first"),
        (lambda ns, pages: ns.pin(keys=[KeyRun(KEYS)], first=1), "bad_first"),
        (lambda ns, pages: ns.store(keys=[KeyRun(KEYS[:9])], pages=pages), "bad_pages"),
    ],
)
def test_runs_that_do_not_fit_the_call_are_refused(
    ns: OpenNamespace, pages: Any, call: Any, code: str
) -> None:
    with pytest.raises(UsageError) as caught:
        call(ns, pages)
    assert caught.value.code == code


def test_call_without_a_page_asks_nobody(ns: OpenNamespace, pages: Any) -> None:
    assert ns.lookup(keys=[KeyRun([])]).pages == 0
    assert ns.store(keys=[KeyRun([])], pages=pages[:0]).stored == 0
    assert ns.load(keys=[KeyRun([]), KeyRun([])], out=empty(pages)) == 0
    assert ns.pin(keys=[KeyRun([])]).pages == 0


@pytest.mark.parametrize("path", ["remote", "model"])
def test_remote_client_refuses_runs(ns: OpenNamespace, pages: Any, path: str) -> None:
    run = [KeyRun(KEYS)]
    for call in (
        lambda: ns.lookup(keys=run),
        lambda: ns.load(keys=run, out=pages),
        lambda: ns.store(keys=run, pages=pages),
        lambda: ns.pin(keys=run),
    ):
        with pytest.raises(UsageError, match="unix://") as caught:
            call()
        assert caught.value.code == "unsupported"

"""The pages of the bench beside peers: a store that hands out anything else than what was stored is
found out, whatever it exchanged."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvwarehouse_bench.peers.client import StoreClient, corrupt_one_byte
from kvwarehouse_bench.peers.store import CannotRunError, StampedPages, WrongBytesError, fill
from kvwarehouse_bench.peers.stores.files import Files

PAGE_BYTES, COUNT = 4096, 16


@pytest.fixture
def pages() -> StampedPages:
    """As a right load leaves them, of round 3."""
    source = np.zeros(PAGE_BYTES * COUNT, np.uint8)
    fill(source)
    found = StampedPages.over(source, np.ones_like(source), PAGE_BYTES)
    found.stamp(3)
    found.wipe()
    found.target[:] = found.source
    return found


def test_right_pages_pass(pages: StampedPages) -> None:
    pages.check(3)
    pages.check_whole()


def test_pages_that_changed_places_are_found(pages: StampedPages, rng: random.Random) -> None:
    one, other = rng.sample(range(COUNT), 2)
    pages.target[[one, other]] = pages.target[[other, one]]
    with pytest.raises(WrongBytesError, match="2 pages have wrong stamps"):
        pages.check(3)


def test_pages_of_another_round_are_found(pages: StampedPages) -> None:
    with pytest.raises(WrongBytesError, match=f"{COUNT} pages"):
        pages.check(2)


@pytest.mark.parametrize("part", [slice(None, 8), slice(-8, None), slice(2048, 2056)])
def test_page_that_came_in_part_is_found(pages: StampedPages, part: slice) -> None:
    pages.target[5, part] = 0
    with pytest.raises(WrongBytesError, match="page 5"):
        pages.check(3)


def test_target_that_nobody_filled_is_found(pages: StampedPages) -> None:
    pages.wipe()
    with pytest.raises(WrongBytesError):
        pages.check(3)


def test_byte_between_the_stamps_is_found_by_comparing_whole(
    pages: StampedPages, rng: random.Random
) -> None:
    at = rng.randrange(8, PAGE_BYTES // 2)
    pages.target[7, at] ^= 1
    pages.check(3)
    with pytest.raises(WrongBytesError, match="page 7"):
        pages.check_whole()


def test_flipped_byte_is_one_byte_of_the_right_file(pages: StampedPages, tmp_path: Any) -> None:
    for at in range(COUNT):
        (tmp_path / str(at)).write_bytes(b"header" + pages.source[at].tobytes())
    corrupt_one_byte(tmp_path, pages.source[4])
    for at in range(COUNT):
        stored = np.frombuffer((tmp_path / str(at)).read_bytes()[6:], np.uint8)
        assert (stored != pages.source[at]).sum() == (1 if at == 4 else 0)


def test_flip_of_a_page_that_is_in_no_file_says_so(pages: StampedPages, tmp_path: Any) -> None:
    (tmp_path / "other").write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(CannotRunError, match="none of its files"):
        corrupt_one_byte(tmp_path, pages.source[0])


class Exchanging(Files):
    """Hands out the second page first."""

    def load(self, names: Any, pages: StampedPages) -> int:
        return super().load([names[1], names[0], *names[2:]], pages)


class Lazy(Files):
    """Says that it filled what it did not touch."""

    def load(self, names: Any, pages: StampedPages) -> int:
        return pages.count


class Forgetful(Files):
    def store(self, names: Any, pages: StampedPages) -> None:
        super().store(names[:-1], pages.part(0, pages.count - 1))


class Stubborn(Files):
    """Hands out what was stored under another name before."""

    first: Any = None

    def clear(self) -> None:
        if self.first is None:
            super().clear()

    def load(self, names: Any, pages: StampedPages) -> int:
        self.first = self.first or names
        return super().load(self.first, pages)


@pytest.mark.parametrize(
    ("store", "what"),
    [
        (Exchanging, "2 pages have wrong stamps"),
        (Lazy, "wrong stamps"),
        (Forgetful, "16 pages were stored, 15 are found"),
        (Stubborn, "wrong stamps"),
    ],
)
def test_client_finds_out_a_store_that_lies(
    store: type[Files], what: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(store, tmp_path, monkeypatch)
    client.do_pages(PAGE_BYTES)

    def two_rounds() -> None:
        for _ in range(2):
            client.do_store("as it is")
            client.do_load("as it is")

    with pytest.raises(WrongBytesError, match=what):
        two_rounds()


def test_client_times_an_honest_store(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(Files, tmp_path, monkeypatch)
    assert client.do_pages(PAGE_BYTES) == COUNT
    assert client.do_store("as it is") > 0
    assert client.do_load("as it is") > 0
    client.do_compare()
    assert len(client.do_store_one("as it is")) == COUNT
    client.do_prompts(8)
    assert len(client.do_lookup(10)) == 10


def client_of(store: type[Files], folder: Any, monkeypatch: pytest.MonkeyPatch) -> StoreClient:
    module = ModuleType("kvwarehouse_bench.peers.stores.made_up")
    module.Made = store  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    return StoreClient(
        {
            "store": "made_up.Made",
            "folder": str(folder),
            "moved_bytes": PAGE_BYTES * COUNT,
            "disk": False,
            "options": {},
        }
    )

"""What the daemon knows of keeps: their names, and what it brings over a restart."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.keeps import Keeps
from kvwarehouse.daemon.ledger import KeepRecord, Ledger
from kvwarehouse.daemon.logs import Log
from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse.types import Namespace
from kvwarehouse.wire import warehouse_pb2 as pb

SPACE = Namespace(model="m", weights="w", dtype="b", layout="l/1", page_tokens=4, page_bytes=8)
TOKENS = b"\1\0\0\0" * 8


class Core:
    """Stands in for the core: two pages of each prompt are stored."""

    def __init__(self) -> None:
        self.kept: dict[int, float] = {}
        self.restored: dict[int, tuple[list[bytes], bool, float, float]] = {}
        self.refusal = ""

    def keep(self, number: int, *asked: Any) -> dict[str, Any]:
        *_, ttl_s, _, promote_s = asked
        assert promote_s <= 2
        if not self.refusal:
            self.kept[number] = ttl_s
        marks = [number.to_bytes(16)]
        return {"refusal": self.refusal, "marks": marks, **row(number, ttl_s)}

    def restore_keep(
        self, number: int, marks: list[bytes], lone: bool, left_s: float, renewed_s: float
    ) -> str:
        if not self.refusal:
            self.restored[number] = (marks, lone, left_s, renewed_s)
            self.kept[number] = left_s
        return self.refusal

    def end_keep(self, number: int) -> bool:
        return self.kept.pop(number, None) is not None

    def keeps(self) -> list[dict[str, Any]]:
        return [row(number, left_s) for number, left_s in self.kept.items()]

    def status(self) -> dict[str, int]:
        return {"kept_pages": 1, "kept_bytes": 2, "keep_capacity_bytes": 3}


def row(number: int, left_s: float) -> dict[str, Any]:
    return {"id": number, "left_s": left_s, "pages": 2, "bytes": 16}


class Warehouse:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def namespace(self, namespace_id: bytes) -> Any:
        found = self._ledger.find(namespace_id)
        if found is None:
            raise UsageError("unknown", code="namespace_unknown")
        return found

    def namespaces(self) -> Any:
        return self._ledger.namespaces()


class World:
    """One daemon after the other on one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = io.StringIO()
        self.open()
        self.ledger.add(self.ledger.propose(SPACE))

    def open(self, *, refusal: str = "") -> None:
        log = Log("json", self.log)
        self.ledger = Ledger([str(self.folder)], b"w" * 16, log, expected=False)
        self.core = Core()
        self.core.refusal = refusal
        warehouse: Any = Warehouse(self.ledger)
        self.keeps = Keeps(self.core, self.ledger, warehouse, log)  # type: ignore[arg-type]
        self.keeps.restore()

    def again(self, **how: Any) -> None:
        self.ledger.close()
        self.open(**how)

    def keep(self, name: str = "a", **fields: Any) -> pb.KeepInfo:
        request = {"namespace_id": SPACE.id, "ttl_s": 60.0, **fields}
        return self.keeps.keep(
            pb.KeepRequest(name=name, prefix=pb.Prefix(tokens=TOKENS), **request), Deadline(60)
        ).keep

    def write(self) -> bool:
        write = self.keeps.tend()
        if write is not None:
            write()
        return write is not None

    def names(self) -> list[str]:
        return [each.name for each in self.keeps.listed().keeps]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.ledger.close()


def test_keep_is_in_the_ledger_once_the_daemon_looked_after_it(world: World) -> None:
    world.keep("a", renewed=True)
    world.keep("b")
    assert world.ledger.keeps() == []
    assert world.write()
    assert not world.write(), "it has nothing more to say"
    world.again()
    assert sorted(world.names()) == ["a", "b"]
    marks, lone, left_s, renewed_s = world.core.restored[1]
    *_, not_renewed_s = world.core.restored[2]
    assert (marks, lone) == ([(1).to_bytes(16)], False)
    assert 59 < left_s <= 60
    assert (renewed_s, not_renewed_s) == (60, 0)
    assert world.keep("c").name == "c", "its number is none of theirs"
    assert len(world.core.kept) == 3


def test_keep_that_ended_is_forgotten_for_good(world: World) -> None:
    world.keep("a")
    world.keep("b")
    world.write()
    world.core.kept.pop(1)
    assert world.names() == ["b"]
    assert world.write()
    world.again()
    assert world.names() == ["b"]


def test_keep_that_was_removed_before_it_was_written_leaves_nothing(world: World) -> None:
    world.keep("a")
    assert world.keeps.remove(pb.RemoveKeepsRequest(name="a")).keeps == 1
    world.write()
    assert world.ledger.keeps() == []
    assert world.core.kept == {}


def test_moved_end_is_written_where_it_moved_by_more_than_a_little(world: World) -> None:
    world.keep("a", ttl_s=1000.0, renewed=True)
    world.write()
    before = world.ledger.keeps()[0].until_ns
    world.core.kept[1] = 1000 + 49
    assert not world.write()
    world.core.kept[1] = 1000 + 60
    assert world.write()
    assert world.ledger.keeps()[0].until_ns > before + 50 * 10**9


def test_keep_whose_time_is_over_or_that_has_no_room_is_not_made_again(world: World) -> None:
    world.keep("over")
    world.keep("full")
    world.write()
    over = next(each for each in world.ledger.keeps() if each.name == "over")
    world.ledger.write_keeps([replace(over, until_ns=time.time_ns() - 1)], [])
    world.again(refusal="bytes")
    assert world.names() == []
    assert '"event": "keeps_lost", "bytes": 1' in world.log.getvalue()
    assert world.write()
    assert world.ledger.keeps() == []


def test_clock_that_was_set_back_makes_no_keep_longer(world: World) -> None:
    world.keep("a")
    world.write()
    record = world.ledger.keeps()[0]
    world.ledger.write_keeps([replace(record, until_ns=record.until_ns + 10**15)], [])
    world.again()
    assert world.core.restored[1][2] == 60


def test_refused_keep_leaves_the_one_of_its_name(world: World) -> None:
    world.keep("a")
    world.core.refusal = "bytes"
    with pytest.raises(CapacityError) as refused:
        world.keep("a")
    assert refused.value.code == "keeps_full"
    assert refused.value.context == {"bound": "bytes", "kept_bytes": "2"}
    assert world.names() == ["a"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_s": 0.9},
        {"ttl_s": float("nan")},
        {"ttl_s": 367 * 86_400.0},
        {"name": "\x1b[2J"},
        {"name": "ä" * 129},
        {"lone": True},
    ],
)
def test_wish_that_is_none_is_refused_before_the_core_is_asked(
    world: World, wrong: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as refused:
        world.keep(**wrong)
    assert refused.value.code == "bad_keep"
    assert world.core.kept == {}


def test_request_that_names_no_keep_removes_none(world: World) -> None:
    world.keep("a")
    for empty in (pb.RemoveKeepsRequest(), pb.RemoveKeepsRequest(name=""),
                  pb.RemoveKeepsRequest(namespace_id=SPACE.id)):  # fmt: skip
        with pytest.raises(UsageError) as refused:
            world.keeps.remove(empty)
        assert refused.value.code == "no_target"
    assert world.names() == ["a"]


@pytest.mark.parametrize("refusal", ["bytes", "pages", "keeps", "ends", "gone"])
def test_refusal_says_which_bound_and_what_to_do(world: World, refusal: str) -> None:
    world.core.refusal = refusal
    with pytest.raises(CapacityError, match=r"this is not kept: .*; .*") as refused:
        world.keep("a")
    assert refused.value.context["bound"] == refusal
    assert "{" not in refused.value.message


def test_keep_beyond_their_number_is_refused_but_in_the_place_of_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvwarehouse.daemon.keeps.MAX_KEEPS", 2)
    world.keep("a")
    world.keep("b")
    with pytest.raises(CapacityError, match="keeps"):
        world.keep("c")
    assert world.keep("b").name == "b"
    assert sorted(world.names()) == ["a", "b"]


def test_list_fits_a_message(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        world.keep(name)
    room = 2 * world.keeps.listed().keeps[0].ByteSize()
    monkeypatch.setattr("kvwarehouse.daemon.keeps.MAX_LIST_BYTES", room)
    assert len(world.names()) == 2


def test_keeps_are_those_of_the_ledger_that_was_there_last(tmp_path: Path) -> None:
    log = Log("json", io.StringIO())
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        for _ in range(number + 1):
            Ledger([str(folder)], b"w" * 16, log, expected=False).close()
        ledger = Ledger([str(folder)], b"w" * 16, log, expected=False)
        record = KeepRecord(number, str(number), b"n" * 16, 60, False, 1, False, (b"e" * 16,))
        ledger.write_keeps([record], [])
        ledger.close()
    ledger = Ledger([str(folder) for folder in folders], b"w" * 16, log, expected=False)
    assert [each.name for each in ledger.keeps()] == ["1"]
    ledger.close()

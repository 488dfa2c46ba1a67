"""`check` over both tiers: it reads every copy of every page, says which is bad and why, and a
repair drops that copy alone, for good. Directories without a daemon are checked by the same code.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli.check import CheckReport
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.main import main
from kvwarehouse.daemon import deadline as deadline_module
from kvwarehouse.types import BadCopy, CheckProgress, TierCheck
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, page_of, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit import damage, tally

pytestmark = pytest.mark.timeout(240)

PAGE_BYTES = 20_000
PAGES = 24
NODES = list(range(PAGES))
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
SIZES = {"dram": "8MiB", "nvme_capacity": "32MiB", "nvme_segment": "2MiB", "grace_s": "0.1"}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """Every page is in both tiers."""
    with Serving(tmp_path, **SIZES) as serving:
        store(serving)
        yield serving


def store(serving: Serving) -> None:
    with serving.connect() as client:
        result = client.open(SPACE).store(NODES, pages_of(NODES, 0, 0, PAGE_BYTES), timeout_s=60)
        assert result.dropped == {}
        assert client.flush().pending == 0


def load(serving: Serving, first: int = 0) -> int:
    with serving.connect() as client:
        out = np.zeros((PAGES - first, PAGE_BYTES), np.uint8)
        loaded = client.open(SPACE).load(NODES, out, first=first, timeout_s=60)
    check_pages(out[:loaded], NODES[first : first + loaded], 0, 0)
    return int(loaded)


def check(serving: Serving, *, repair: bool = False) -> tuple[kvw.CheckProgress, list[Any]]:
    """The last totals, and (tier, reason) of all that is bad, in order."""
    with serving.connect() as client:
        parts = list(client.check(SPACE, repair=repair))
    bad = [(bad.tier, bad.reason) for part in parts for bad in part.bad]
    return parts[-1], sorted(bad)


def in_arena(serving: Serving, node: int) -> damage.Place:
    return damage.find_one([serving.arena_dir / "arena"], page_of(node, 0, 0, PAGE_BYTES))


def in_segments(serving: Serving, node: int) -> damage.Place:
    """The newest record of the page."""
    return damage.find(serving.segments, page_of(node, 0, 0, PAGE_BYTES))[-1]


def evict(serving: Serving) -> None:
    with serving.connect() as client:
        client.evict(SPACE, PAGES)
        assert client.open(SPACE).lookup(NODES).by_tier["dram"] == 0


def tombstones(serving: Serving) -> int:
    with serving.connect() as client:
        return int(client.status()["service"]["ledger_tombstones"])


def test_check_reads_both_copies_of_every_page(serving: Serving) -> None:
    last, bad = check(serving)
    assert [(tier.tier, tier.pages, tier.damaged) for tier in last.tiers] == [
        ("dram", PAGES, 0),
        ("nvme", PAGES, 0),
    ]
    assert bad == []
    nvme = last.tiers[1]
    # A header block and the payload, padded to blocks.
    assert nvme.size_bytes == PAGES * (4096 + 20480)


@pytest.mark.parametrize("where", ["header", "payload", "place"])
def test_record_that_is_bad_is_named_with_its_reason_and_nothing_is_changed(
    serving: Serving, rng: random.Random, where: str
) -> None:
    node = rng.randrange(PAGES - 1)
    place = in_segments(serving, node)
    if where == "header":
        place.before(4096).flip(rng.randrange(8), at=rng.randrange(4096))
    elif where == "payload":
        place.flip(rng.randrange(8), at=rng.randrange(PAGE_BYTES))
    else:
        size = 4096 + 20480
        place.before(4096).write(in_segments(serving, node + 1).before(4096).read(size))
    reason = {"header": "header", "payload": "digest", "place": "place"}[where]
    for _ in range(2):
        last, bad = check(serving)
        assert bad == [("nvme", reason)]
        assert last.quarantined == 0
    assert load(serving) == PAGES  # from DRAM


def test_repair_drops_the_copy_on_nvme_alone_and_it_is_written_again(
    serving: Serving, rng: random.Random
) -> None:
    in_segments(serving, 5).flip(at=rng.randrange(PAGE_BYTES))
    last, bad = check(serving, repair=True)
    assert bad == [("nvme", "digest")]
    assert (last.tiers[0].dropped, last.tiers[1].dropped) == (0, 1)
    assert last.tiers[1].dropped_bytes == 4096 + 20480
    with serving.connect() as client:
        assert client.flush().not_admitted == 0
    last, bad = check(serving)
    assert (last.tiers[0].pages, last.tiers[1].pages, bad) == (PAGES, PAGES, [])
    evict(serving)
    assert load(serving) == PAGES


def test_repair_drops_the_copy_in_dram_alone_and_the_page_is_promoted_again(
    serving: Serving, rng: random.Random
) -> None:
    in_arena(serving, 5).flip(at=rng.randrange(PAGE_BYTES))
    last, bad = check(serving, repair=True)
    assert bad == [("dram", "digest")]
    assert (last.tiers[0].dropped, last.tiers[1].dropped) == (1, 0)
    assert load(serving) == PAGES


def test_repair_drops_both_copies_where_both_are_bad(serving: Serving) -> None:
    in_arena(serving, 5).flip()
    in_segments(serving, 5).flip()
    last, bad = check(serving, repair=True)
    assert bad == [("dram", "digest"), ("nvme", "digest")]
    assert last.quarantined == 2
    assert load(serving) == 5


@pytest.mark.parametrize("found_by", ["load", "repair"])
def test_quarantined_record_stays_away_over_restarts_and_a_later_good_one_is_found(
    serving: Serving, found_by: str
) -> None:
    evict(serving)
    in_segments(serving, 5).flip()
    if found_by == "load":
        assert load(serving) == 5
        eventually(lambda: tombstones(serving) == 1, "the ledger has a tombstone of it")
    else:
        assert check(serving, repair=True)[1] == [("nvme", "digest")]
        assert tombstones(serving) == 1  # before the answer
    for restart in range(2):
        serving.kill()
        serving.lose_arena()
        serving.start()
        last, bad = check(serving)
        assert bad == [], f"it is back after restart {restart}"
        assert last.tiers[1].pages <= PAGES - 1
        assert load(serving) == 5
        with serving.connect() as client:
            assert client.status()["core"]["quarantined"] == 0
    store(serving)
    serving.kill()
    serving.lose_arena()
    serving.start()
    assert load(serving) == PAGES


def test_check_goes_on_beside_loads_that_promote(serving: Serving) -> None:
    evict(serving)
    with serving.connect() as client:
        parts = client.check(SPACE)
        assert load(serving) == PAGES
        assert not any(part.bad for part in parts)


# --- directories without a daemon


def offline(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    capsys.readouterr()
    status = main(["check", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def contents(folder: Path) -> dict[str, bytes]:
    kept = (path for path in folder.rglob("*") if path.is_file() and path.name != "daemon.lock")
    return {str(path): path.read_bytes() for path in kept}


@pytest.mark.parametrize("killed", [False, True])
def test_segments_of_a_stopped_daemon_are_checked_and_not_changed(
    serving: Serving, capsys: pytest.CaptureFixture[str], killed: bool
) -> None:
    if killed:
        serving.kill()
    else:
        serving.stop()
    before = contents(serving.nvme_dir)
    status, report = offline(capsys, "--nvme-dir", serving.nvme_dir)
    assert status == Exit.OK
    assert report["tiers"]["nvme"]["pages"] == PAGES
    assert report["tiers"]["dram"]["pages"] == 0
    place = in_segments(serving, 5)
    place.flip()
    both = ("--nvme-dir", serving.nvme_dir, "--arena-dir", serving.arena_dir)
    status, report = offline(capsys, *both)
    assert status == Exit.FOUND
    refused = report["at_start"]["refused_records"]
    assert report["tiers"]["nvme"]["damaged"] + refused == 1
    assert report["tiers"]["dram"] | {"size_bytes": 0} == {
        "pages": PAGES, "size_bytes": 0, "damaged": 0, "dropped": 0, "dropped_bytes": 0
    }  # fmt: skip
    place.flip()
    assert contents(serving.nvme_dir) == before
    serving.start()
    assert load(serving) == PAGES


def test_check_of_directories_takes_as_long_as_it_takes(
    serving: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a large tier was never checked to its end, whether its daemon ran or not."""
    serving.stop()
    days = count()
    clock = SimpleNamespace(monotonic=lambda: 86_400.0 * next(days))
    monkeypatch.setattr(deadline_module, "time", clock)
    status, report = offline(capsys, "--nvme-dir", serving.nvme_dir)
    assert (status, report["done"]) == (Exit.OK, True)
    assert report["tiers"]["nvme"]["pages"] == PAGES


def test_repair_of_a_stopped_daemons_directories_lasts(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving.connect() as client:  # so that the next start closes the segment
        assert client.flush().pending == 0
    serving.stop()
    serving.start()
    with serving.connect() as client:
        segments = client.status()["core"]["tiers"]["nvme"]
        assert segments["pages"] == PAGES
    serving.stop()
    in_segments(serving, 5).flip()
    in_arena(serving, 7).flip()
    both = ("--nvme-dir", serving.nvme_dir, "--arena-dir", serving.arena_dir)
    status, report = offline(capsys, *both, "--repair")
    refused = report["at_start"]["refused_records"]
    assert (status, report["left"]) == (Exit.FOUND if refused else Exit.REPAIRED, refused)
    assert report["tiers"]["dram"]["dropped"] == 1
    assert report["tiers"]["nvme"]["dropped"] + refused == 1
    serving.start()
    _, bad = check(serving)
    assert bad == []
    assert load(serving) == PAGES


def test_exit_status_tells_damage_that_was_repaired_from_damage_that_is_left(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = ("--address", serving.address)
    assert offline(capsys, *daemon)[0] == Exit.OK
    in_arena(serving, 7).flip()
    for arguments, status, left in (
        ((), Exit.FOUND, 1),
        (("--repair",), Exit.REPAIRED, 0),
        (("--repair",), Exit.OK, 0),
        ((), Exit.OK, 0),
    ):
        found, report = offline(capsys, *daemon, *arguments)
        assert (found, report["left"]) == (status, left)


@pytest.mark.parametrize(
    ("reason", "dropped", "left"),
    [("digest", 0, 2), ("digest", 1, 1), ("digest", 2, 0), ("io_error", 0, 2), ("io_error", 2, 2)],
)
def test_what_no_repair_mends_counts_as_left(reason: str, dropped: int, left: int) -> None:
    report = CheckReport({"bad_headers": 1})
    bad = tuple(BadCopy(bytes([key] * 16), "nvme", reason) for key in range(2))
    report.add(CheckProgress((TierCheck("nvme", 9, 9, 2, dropped, dropped),), bad))
    assert (report.has_damage, report.left) == (True, left)


def test_segment_level_damage_is_in_the_report(
    serving: Serving, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = in_segments(serving, 0).path
    with Serving(tmp_path / "other", **SIZES) as other:
        store(other)
        other.stop()
        foreign = damage.find(other.segments, page_of(0, 0, 0, PAGE_BYTES))[0].path
        serving.stop()
        shutil.copyfile(foreign, serving.nvme_dir / "segments" / "00000400.seg")
    damage.Place(own, 0).flip(at=40)
    status, report = offline(capsys, "--nvme-dir", serving.nvme_dir)
    assert status == Exit.FOUND
    assert report["at_start"]["bad_headers"] == 1
    assert report["at_start"]["foreign_segments"] == 1
    found = {each["finding"]: each["segment"] for each in report["findings"]}
    assert found["nvme_foreign_segment"] == "400"
    assert "nvme_bad_header" in found
    # A table for people says it too.
    assert main(["check", "--nvme-dir", str(serving.nvme_dir)]) == Exit.FOUND
    assert "1 segments of another warehouse" in capsys.readouterr().out


def test_directories_of_a_running_daemon_strange_ones_and_those_without_ledger_are_refused(
    serving: Serving, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(*arguments: object) -> str:
        capsys.readouterr()
        assert main(["check", *map(str, arguments)]) in (Exit.FAILED, Exit.USAGE)
        return capsys.readouterr().err

    assert f"pid {serving.pid}" in refused("--nvme-dir", serving.nvme_dir)
    assert "no directory of a warehouse" in refused("--nvme-dir", tmp_path)
    assert "leave NAMESPACE" in refused("m", "--nvme-dir", serving.nvme_dir)
    serving.stop()
    (serving.arena_dir / "ledger.mdb").unlink()
    assert "no ledger" in refused("--arena-dir", serving.arena_dir)
    (serving.nvme_dir / "ledger.mdb").write_bytes(b"rubbish" * 1000)
    assert "is damaged" in refused("--nvme-dir", serving.nvme_dir)


# --- many


def test_check_finds_every_copy_that_was_damaged_and_no_other(
    serving: Serving, rng: random.Random
) -> None:
    for _ in range(tally.rounds(2)):
        places = [
            (tier, find(serving, node))
            for node in NODES
            for tier, find in (("dram", in_arena), ("nvme", in_segments))
            if rng.random() < 0.4
        ]
        flips = [(place, rng.randrange(8), rng.randrange(PAGE_BYTES)) for _, place in places]
        for place, bit, at in flips:
            place.flip(bit, at=at)
        _, bad = check(serving)
        assert bad == sorted((tier, "digest") for tier, _ in places)
        for place, bit, at in flips:
            place.flip(bit, at=at)
        assert check(serving)[1] == []
        tally.count("copy of a page flipped, found by check", len(places))

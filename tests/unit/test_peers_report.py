"""What the bench beside peers says: which way its ratios go, and that nothing missed is hidden."""

from __future__ import annotations

from typing import Any

import pytest

from kvwarehouse_bench.peers.contenders import DISK, MEMORY, OURS, PEERS, ROOT, ContenderError
from kvwarehouse_bench.peers.goals import goals
from kvwarehouse_bench.peers.report import BEGIN, END, peers_report, pictures, with_report
from kvwarehouse_bench.peers.results import PeerResult, PeersResults, compared, equal_threads
from kvwarehouse_bench.peers.workloads import COLD, LOAD, LOOKUP, STORE, STORE_ONE, PeerRounds

KINDS = {kind.key: kind for kind in PEERS}
ABOUT = {name: name for name in ("version", "layout", "durability", "lookup", "start")}
RIGHT = {
    "wrong": 0,
    "miss": 4,
    "error": 0,
    "right": 0,
    "flipped": 4,
    "others_right": 4,
    "others": 4,
}


def found_of(peer: str, *rounds: PeerRounds, flips: dict[str, int] | None = None) -> PeersResults:
    beside = PeerResult(KINDS[peer], about={MEMORY: ABOUT, DISK: ABOUT}, rounds=list(rounds))
    return PeersResults({"machine": "m"}, 1e9, PeerResult(OURS, flips=flips), [beside])


def rounds_of(work: str, peer: Any, ours: Any, way: str = "as it is") -> PeerRounds:
    return PeerRounds(work, 2 << 20, 8, {way: peer}, {"verified": ours})


def texts(found: PeersResults) -> str:
    return "\n".join(
        "|".join(map(str, row)) for block in peers_report(found).tables for row in block.rows
    )


def verdicts(found: PeersResults) -> dict[str, str]:
    return {goal.text: goal.verdict for goal in goals(found) if goal.met is not None}


def test_ratio_is_above_one_where_the_warehouse_is_quicker() -> None:
    each = compared(rounds_of(LOAD, [2.0, 4.0, 9.0], [1.0, 1.0, 3.0]), "as it is", "verified")
    assert each is not None
    assert each.ratio.median == 3.0


def test_ratio_of_single_calls_is_that_of_the_rounds_p50() -> None:
    calls = [[0.1, 5.0, 50.0], [0.1, 6.0, 90.0]]
    each = compared(rounds_of(LOOKUP, calls, [[1.0] * 3, [2.0] * 3]), "as it is", "verified")
    assert each is not None
    assert list(each.peer) == [5.0, 6.0]
    assert each.ratio.median == 4.0


def test_rounds_that_one_side_alone_has_are_left_out() -> None:
    each = compared(rounds_of(LOAD, [2.0], [1.0, 1.0]), "as it is", "verified")
    assert each is not None
    assert len(each.ours) == 1
    assert compared(rounds_of(LOAD, [], [1.0]), "as it is", "verified") is None


def test_two_threads_are_compared_with_two() -> None:
    assert equal_threads("2 threads") == "verified, 2 threads"
    assert equal_threads("1 thread") == "verified"


@pytest.mark.parametrize(
    ("rounds", "goal", "verdict"),
    [
        (rounds_of(LOOKUP, [[5e-4]], [[9e-5]]), "best peer", "met"),
        (rounds_of(LOOKUP, [[4e-4]], [[9e-5]]), "best peer", "missed"),
        (rounds_of(LOOKUP, [[9e-4]], [[1.1e-4]]), "under 100 us", "missed"),
        (rounds_of(LOAD, [1.09], [1.0]), "loads, verified: at least 1.1", "missed"),
        (rounds_of(LOAD, [1.11], [1.0]), "loads, verified: at least 1.1", "met"),
        (rounds_of(STORE, [0.9], [1.0]), "stores: at least 1", "missed"),
        (rounds_of(STORE_ONE, [[3.1]], [[1.0]]), "one page, p50, up to 2 MiB: at least 3", "met"),
    ],
)
def test_goal_is_judged_by_what_was_measured(rounds: PeerRounds, goal: str, verdict: str) -> None:
    judged = [said for text, said in verdicts(found_of("mooncake", rounds)).items() if goal in text]
    assert judged == [verdict]


def test_best_peer_is_the_one_that_is_nearest() -> None:
    found = found_of("redis", rounds_of(LOOKUP, [[6e-4]], [[1e-4]]))
    slower = PeerResult(KINDS["files"], rounds=[rounds_of(LOOKUP, [[9e-3]], [[1e-4]])])
    found.peers.append(slower)
    assert next(goal.seen for goal in goals(found) if "best peer" in goal.text) == "6.0 (Redis)"


def test_goal_is_not_met_by_what_nobody_measured() -> None:
    assert verdicts(found_of("files")) == {}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [({}, "met"), ({"miss": 3, "wrong": 1}, "missed"), ({"others_right": 3}, "missed")],
)
def test_flip_that_is_served_or_takes_neighbours_along_misses_the_goal(
    changed: dict[str, int], verdict: str
) -> None:
    found = found_of("files", flips={**RIGHT, **changed})
    assert [*verdicts(found).values()] == [verdict]


def test_missed_goals_stand_in_the_first_line() -> None:
    summary = peers_report(found_of("mooncake", rounds_of(STORE, [0.9], [1.0]))).summary
    assert summary == "0 of 1 goals met; missed: stores: at least 1 times as fast as Mooncake."


def test_peer_that_did_not_run_is_a_row_with_the_reason() -> None:
    found = found_of("files", rounds_of(LOAD, [1.0], [1.0]))
    found.peers.append(PeerResult(KINDS["redis"], reasons={MEMORY: "no server [here]"}))
    assert "Redis|memory|did not run: no server [here]" in texts(found)
    assert "Redis: did not run, see above" in texts(found)


def test_work_at_which_a_peer_failed_says_why_and_shows_what_there_is() -> None:
    rounds = rounds_of(COLD, [1.0], [1.0])
    rounds.reason = "page 3 of 8 is not what was stored"
    shown = texts(found_of("lmdb", rounds))
    assert "LMDB: failed: page 3 of 8 is not what was stored" in shown
    assert "LMDB|2 MiB" in shown


def test_reason_is_the_last_line_of_what_happened() -> None:
    error = "kvwarehouse_bench.peers.store.CannotRunError: it ended"
    trace = f"Traceback (most recent call last):\n  File\n{error}"
    said = f"{trace}\n\nthe end of its log:\nchatter"
    assert ContenderError(KINDS["redis"], said).reason == "it ended"
    late = "Redis did not answer in 120 s\nthe end of its log:\nchatter"
    assert ContenderError(KINDS["redis"], late).reason == "Redis did not answer in 120 s"


def test_page_and_picture_have_every_peer_that_was_measured() -> None:
    found = found_of("lmcache", rounds_of(LOAD, [2.0, 2.0], [1.0, 1.0], "1 thread"))
    plots = [block for block in peers_report(found).blocks if hasattr(block, "series")]
    assert [series.name for series in plots[0].series] == ["kvwarehouse, verified", "LMCache"]
    moved = 8 * (2 << 20) / 1e9
    assert plots[0].series[0].points == [(2.0, pytest.approx(moved))]
    assert plots[0].series[1].points == [(2.0, pytest.approx(moved / 2))]


def test_document_has_every_table_and_picture_between_its_marks_and_nothing_else_changes() -> None:
    found = found_of("lmdb", rounds_of(LOAD, [2.0, 2.0], [1.0, 1.0]))
    report = peers_report(found)
    before, after = "# Title\n\nwords\n\n", "\nmore words\n"
    written = with_report(before + BEGIN + "old\n" + END + after, report, "images")
    assert written.startswith(before + BEGIN)
    assert written.endswith(END + after)
    assert "old" not in written
    assert report.summary in written
    for table in report.tables:
        assert table.title[1:] in written
    for name in pictures(report):
        assert f"](images/{name})" in written
    assert with_report(written, report, "images") == written


def test_document_has_the_marks() -> None:
    document = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert with_report(document, peers_report(found_of("lmdb")), "images") != document

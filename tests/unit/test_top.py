"""What `kvwarehouse top` makes of two snapshots, what it remembers, and how it fits a terminal."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from kvwarehouse.cli import top_frame
from kvwarehouse.cli.top_frame import Frame, NamespaceSize, frame_of, rates_of
from kvwarehouse.cli.top_history import KEPT, History
from kvwarehouse.cli.top_view import View, lines_of
from kvwarehouse.wire import fill, plain, status_pb2

NOW = datetime(2026, 11, 27, 12, 0, 0)
DEEP = "core.tiers.nvme"


def snapshot(**changed: Any) -> dict[str, Any]:
    """A well daemon's, ten seconds old; `changed`: values by their paths with __ for the dots."""
    status = plain(
        fill(
            status_pb2.Status(),
            {
                "name": "default",
                "version": "1",
                "state": "serving",
                "core": {
                    "warehouse_id": "ab",
                    "incarnation": 3,
                    "uptime_s": 10.0,
                    "tiers": {
                        "hbm": {"health": "off"},
                        "dram": {"health": "ok", "capacity_bytes": 1 << 30, "used_bytes": 1 << 29},
                        "nvme": {"health": "ok", "capacity_bytes": 1 << 40},
                    },
                },
                "service": {"ledger_health": "ok", "streams_max": 8},
            },
        )
    )
    for path, value in changed.items():
        put(status, path.replace("__", "."), value)
    return status


def put(status: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split(".")
    for name in way:
        status = status[name]
    status[last] = value


def later(status: dict[str, Any], seconds: float, **changed: Any) -> dict[str, Any]:
    after = copy.deepcopy(status)
    after["core"]["uptime_s"] += seconds
    for path, value in changed.items():
        put(after, path.replace("__", "."), value)
    return after


def numbers(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict):
        for each in tree.values():
            yield from numbers(each)
    else:
        yield tree


def test_rate_is_the_rise_a_second_by_the_daemons_clock() -> None:
    before = snapshot(core__loads__bytes_loaded=1000, core__stores__dropped={"later": 4})
    after = later(
        before,
        4.0,
        core__loads__bytes_loaded=3000,
        core__stores__dropped={"later": 6, "no_room": 2},
        core__sessions=7,
    )
    rates = rates_of(before, after)
    assert rates["core"]["loads"]["bytes_loaded"] == 500.0
    assert rates["core"]["stores"]["dropped"] == {"later": 0.5, "no_room": 0.5}
    assert "sessions" not in rates["core"], "what may fall has no rate"
    assert frame_of(before, after, {}).interval_s == 4.0


def test_counter_that_fell_has_no_negative_rate() -> None:
    before = snapshot(core__lookups__calls=100)
    after = later(before, 1.0, core__lookups__calls=40, core__loads__calls=5)
    assert min(numbers(rates_of(before, after))) == 0.0
    assert rates_of(before, after)["core"]["loads"]["calls"] == 5.0


@pytest.mark.parametrize("other", [{"core__incarnation": 4}, {"core__warehouse_id": "cd"}])
def test_counters_of_another_daemon_are_not_compared(other: dict[str, Any]) -> None:
    before = snapshot(core__lookups__calls=100)
    after = later(before, 5.0, core__lookups__calls=400, **other)
    frame = frame_of(before, after, {})
    assert frame.restarted
    assert (frame.interval_s, frame.rates) == (None, {})
    assert all(flow.calls_per_s is None for flow in frame.flows)
    assert not frame_of(before, later(before, 5.0), {}).restarted


def test_daemon_that_has_recovered_was_not_restarted() -> None:
    """While it recovers its status has no core."""
    early = plain(status_pb2.Status(name="default", state="recovering"))
    frame = frame_of(None, early, {})
    assert frame.state == "recovering"
    assert shown(frame)
    assert not frame_of(early, snapshot(), {}).restarted
    assert frame_of(snapshot(), early, {}).restarted


def test_two_snapshots_of_one_moment_have_no_rates() -> None:
    before = snapshot()
    assert rates_of(before, copy.deepcopy(before)) == {}
    assert rates_of(None, before) == {}


def test_hit_rates_are_of_the_interval_and_of_the_run() -> None:
    before = snapshot(core__lookups__pages_hit_dram=100, core__lookups__pages_missed=100)
    after = later(
        before,
        2.0,
        core__lookups__pages_hit_dram=160,
        core__lookups__pages_hit_nvme=20,
        core__lookups__pages_missed=120,
    )
    frame = frame_of(before, after, {})
    assert frame.hit_rate == pytest.approx(0.8)
    assert frame.hit_rate_run == pytest.approx(0.6)
    shares = {tier.name: tier.hit_share for tier in frame.tiers}
    assert shares == pytest.approx({"hbm": 0.0, "dram": 0.6, "nvme": 0.2})
    assert frame_of(after, later(after, 1.0), {}).hit_rate is None, "nobody looked anything up"


def test_tier_takes_in_what_is_stored_and_what_comes_back_from_nvme() -> None:
    before = snapshot()
    after = later(
        before,
        2.0,
        core__stores__pages_sealed=6,
        core__tiers__nvme__pages_promoted=4,
        core__tiers__nvme__written_records=8,
        core__tiers__dram__left={"evicted": 2, "cleared": 2},
    )
    tiers = {tier.name: tier for tier in frame_of(before, after, {}).tiers}
    assert (tiers["dram"].pages_in_per_s, tiers["dram"].pages_out_per_s) == (5.0, 2.0)
    assert (tiers["nvme"].pages_in_per_s, tiers["nvme"].pages_out_per_s) == (4.0, 0)


def test_loads_and_stores_count_shards_and_say_so() -> None:
    before = snapshot()
    after = later(
        before,
        2.0,
        core__loads__pages_loaded=16,
        core__stores__pages_sealed=3,
        core__stores__shards_stored=24,
    )
    flows = {flow.name: flow.pages_per_s for flow in frame_of(before, after, {}).flows}
    assert (flows["loads, shards"], flows["stores, shards"]) == (8.0, 12.0)


def test_every_loss_is_shown_when_its_counter_rises_and_only_then() -> None:
    before, after = snapshot(), later(snapshot(), 2.0)
    for _, path, reason in top_frame._LOSSES:
        put(before, path, 10 if reason else {"old": 10})
        put(after, path, 14 if reason else {"old": 10, "fresh": 4})
    found = frame_of(before, after, {}).losses
    assert [(line.what, line.reason) for line in found] == [
        (what, reason or "fresh") for what, _, reason in top_frame._LOSSES
    ]
    assert {line.per_s for line in found} == {2.0}
    assert {line.total for line in found} == {4, 14}
    assert frame_of(after, later(after, 1.0), {}).losses == ()


def test_remote_tier_has_a_line_and_a_figure_where_there_is_one() -> None:
    plain_frame = frame_of(snapshot(), later(snapshot(), 1.0), {})
    assert "put into store" not in {flow.name for flow in plain_frame.flows}
    assert plain_frame.underway.remote_puts is plain_frame.underway.remote_gets is None
    assert "to get" not in "\n".join(shown(plain_frame, 100))
    before = snapshot(remote__state="serving", remote__puts={"stored": 3})
    after = later(
        before,
        2.0,
        remote__puts={"stored": 7, "not_in_dram": 1},
        remote__put_bytes=32 << 20,
        remote__capacity_bytes=100,
        remote__used_bytes=25,
        remote__gets={"filled": 6, "missing": 2},
        remote__get_bytes=64 << 20,
        core__remote_puts__queued_runs=12,
        core__remote_fetches__queued=3,
        core__remote_fetches__under_way=2,
        core__lookups__pages_hit_remote=30,
        core__lookups__pages_missed=10,
    )
    frame = frame_of(before, after, {})
    flow = next(flow for flow in frame.flows if flow.name == "put into store")
    assert (flow.calls_per_s, flow.pages_per_s, flow.bytes_per_s) == (2.0, None, 16 << 20)
    lines = shown(frame, 100)
    assert any(line.startswith("put into store") and "16 MiB" in line for line in lines)
    assert any(line.startswith("read from store") and "32 MiB" in line for line in lines)
    assert (frame.underway.remote_puts, frame.underway.remote_gets) == (12, 5)
    now = next(place for place, line in enumerate(lines) if line.startswith("right now"))
    assert "to put" in lines[now]
    assert "to get" in lines[now]
    assert {"12", "5"} <= set(lines[now + 1].split())
    assert frame.hit_rate == pytest.approx(0.75)
    (tier,) = (line for line in lines if line.startswith("remote"))
    assert "25%" in tier
    assert "75.0%" in tier


def test_snapshot_without_tiers_still_makes_a_frame() -> None:
    """As of a daemon whose status has less than this client knows."""
    bare = {"name": "x", "state": "serving", "core": {"incarnation": 1, "uptime_s": 1.0}}
    after = {**bare, "core": {**bare["core"], "uptime_s": 2.0}}  # type: ignore[dict-item]
    frame = frame_of(bare, after, {})
    assert [tier.health for tier in frame.tiers] == ["off"] * 3
    assert frame.problems == ()
    assert frame.interval_s == 1.0
    assert shown(frame)


def test_namespaces_with_most_bytes_come_first() -> None:
    listed = [
        {"id": "aa", "pages": 9, "dram_pages": 9, "nvme_pages": 0},
        {"id": "bb", "pages": 2, "dram_pages": 2, "nvme_pages": 2},
        {"id": "cc", "pages": 5, "dram_pages": 5, "nvme_pages": 0},
        {"id": "dd", "pages": 0, "dram_pages": 0, "nvme_pages": 0},
    ]
    sizes = {"aa": NamespaceSize("small", 10), "bb": NamespaceSize("large", 1000)}
    found = frame_of(None, snapshot(core__namespaces=listed), sizes).namespaces
    assert [line.id for line in found] == ["bb", "aa", "cc"]
    assert (found[0].model, found[0].dram_bytes, found[0].nvme_bytes) == ("large", 2000, 2000)
    assert (found[2].model, found[2].dram_bytes) == ("", None)


# --- what is remembered


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_problem_is_said_with_its_reason_and_its_age() -> None:
    wrong = [
        {"what": "nvme read only", "reason": "no space left", "for_s": 90.0},
        {"what": "ledger in memory", "reason": "", "for_s": 3.0},
    ]
    text = "\n".join(shown(frame_of(None, snapshot(problems=wrong), {})))
    assert "nvme read only: no space left (for 00:01:30)" in text
    assert "ledger in memory (for 3 s)" in text
    assert "health" in text
    assert "read only" not in "\n".join(shown(frame_of(None, snapshot(), {})))


def test_loss_stays_for_a_while_without_a_rate() -> None:
    before = snapshot()
    rose = later(before, 1.0, core__stores__dropped={"no_room": 3})
    history = History()
    history.add(frame_of(before, rose, {}), at(1))
    assert [line.per_s for line in history.losses] == [3.0]
    quiet = frame_of(rose, later(rose, 1.0), {})
    history.add(quiet, at(2))
    assert [(line.per_s, line.total) for line in history.losses] == [(0.0, 3)]
    history.add(quiet, at(12))
    assert history.losses == ()


def test_daemon_that_does_not_answer_is_said_with_the_reason_until_it_does() -> None:
    history = History()
    history.add(frame_of(None, snapshot(), {}), at(0))
    for second in (1, 2, 3):
        history.miss("unavailable", "no daemon at unix:///s", at(second))
    text = "\n".join(line.plain for line in lines_of(history, at(3), View(100, True, 1.0)))
    assert "not reachable" in text
    assert "no daemon at unix:///s (since 12:00:01; trying again)" in text
    assert "serving" not in text
    history.add(frame_of(snapshot(), later(snapshot(), 9.0, core__incarnation=4), {}), at(4))
    text = "\n".join(line.plain for line in lines_of(history, at(4), View(100, True, 1.0)))
    assert "not reachable" not in text
    assert "at 12:00:04" in text.partition("restarted")[2]


def test_curves_are_bounded_and_have_a_gap_where_nobody_answered() -> None:
    history, status = History(), snapshot()
    for second in range(2 * KEPT):
        after = later(status, 1.0, core__loads__bytes_loaded=second)
        history.add(frame_of(status, after, {}), at(second))
    history.miss("unavailable", "gone", at(0))
    curve = history.curve("loads, shards")
    assert len(curve) == KEPT
    assert curve[-2:] == (2.0 * KEPT - 1, None)


# --- how it looks


def shown(frame: Frame, columns: int = 80, *, unicode: bool = True) -> list[str]:
    history = History()
    history.add(frame, at(0))
    history.add(frame, at(1))
    return [line.plain for line in lines_of(history, at(1), View(columns, unicode, 1.0))]


@pytest.fixture
def busy() -> Frame:
    """Large figures, long names and much that is wrong."""
    ids = [f"{number:032x}" for number in range(8)]
    before = snapshot(
        state="draining",
        core__uptime_s=9e6,
        core__tiers__hbm__health="waiting",
        problems=[
            {"what": "draining", "reason": "stores are refused, loads go on", "for_s": 9.0},
            {"what": "hbm waiting", "reason": "no room on the device, " * 9, "for_s": 9e6},
        ],
        core__tiers__dram__used_bytes=(1 << 30) - 1,
        core__tiers__dram__pages=123_456_789,
        core__namespaces=[
            {"id": each, "pages": 10**9, "dram_pages": 1, "nvme_pages": 10**9} for each in ids
        ],
        core__pins__held=10**6,
    )
    after = later(
        before,
        1.0,
        core__lookups={"calls": 10**10, "pages_hit_dram": 10**12, "pages_missed": 1},
        core__loads__bytes_loaded=10**14,
        core__stores__dropped={"parent_missing": 10**9},
        core__tiers__nvme__relocated_records=10**8,
    )
    return frame_of(before, after, dict.fromkeys(ids, NamespaceSize("模型/" + "m" * 90, 1 << 20)))


@pytest.mark.parametrize("columns", [1, 5, 12, 20, 33, 40, 60, 79, 80, 100, 300])
def test_frame_fits_a_terminal_of_any_width(busy: Frame, columns: int) -> None:
    history = History()
    for second in range(30):
        history.add(busy, at(second))
    view = View(columns, True, 1.0)
    for lines in (lines_of(history, at(30), view), lines_of(unreachable(history), at(30), view)):
        assert lines
        assert max(line.cell_len for line in lines) <= min(columns, 100)


def unreachable(history: History) -> History:
    history.miss("unavailable", "no daemon at unix:///run/kvwarehouse/kvw.sock " * 3, at(30))
    return history


def test_frame_of_80_columns_has_everything(busy: Frame) -> None:
    text = "\n".join(shown(busy))
    for word in (
        "kvwarehouse default", "draining", "up 104 d", "health", "hit rate", "100%", "pages",
        "hits", "in/s", "out/s", "lookups", "loads", "stores", "last 32 s", "clients",
        "to write", "remote", "parent_missing", "1.0G", "000000000000", "and 3 more",
    ):  # fmt: skip
        assert word in text, word


def test_figures_end_beneath_their_titles_whatever_they_are(busy: Frame) -> None:
    calm = frame_of(snapshot(), later(snapshot(), 1.0), {})
    tables = {"tier ": ("dram ", ["bytes", "pages", "hits", "in/s", "out/s"]),
              "a second": ("loads, shards ", ["calls", "pages", "bytes"])}  # fmt: skip
    for head, (row, titles) in tables.items():
        heads = set()
        for frame in (busy, calm):
            title_line, line = (
                next(each for each in shown(frame) if each.startswith(word)) for word in (head, row)
            )
            heads.add(title_line)
            for title in titles:
                end = title_line.index(title) + len(title)
                assert line[end - 1] != " ", (title, line)
                assert line[end : end + 1] in ("", " "), (title, line)
        assert len(heads) == 1, "titles do not move"


def test_terminal_without_blocks_gets_plain_letters(busy: Frame) -> None:
    lines = [line for line in shown(busy, unicode=False) if "模" not in line]
    assert all(line.isascii() for line in lines)
    assert any("####" in line for line in lines)


def test_name_from_outside_sends_nothing_to_the_terminal() -> None:
    listed = [{"id": "aa" * 16, "pages": 1, "dram_pages": 1, "nvme_pages": 0}]
    sizes = {"aa" * 16: NamespaceSize("\x1b]0;owned\x07\n", 1)}
    status = snapshot(core__namespaces=listed, name="\x1b[2J")
    text = "\n".join(shown(frame_of(None, status, sizes), 100))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"\x1b]0;owned" in text

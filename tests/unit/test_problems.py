"""What a daemon says is wrong with it, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from kvwarehouse.daemon.problems import Problems
from kvwarehouse.wire import fill, status_pb2


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def snapshot(**changed: Any) -> status_pb2.Status:
    """A well daemon's; `changed`: values by their paths with __ for the dots."""
    tiers = {"hbm": {"health": "off"}, "dram": {"health": "ok"}, "nvme": {"health": "ok"}}
    well: dict[str, Any] = {
        "state": "serving",
        "core": {"tiers": tiers, "index": {}},
        "service": {"ledger_health": "ok"},
    }
    for path, value in changed.items():
        place = well
        *way, last = path.split("__")
        for name in way:
            place = place[name]
        place[last] = value
    return fill(status_pb2.Status(), well)


def said(problems: Problems, **changed: Any) -> dict[str, tuple[str, float]]:
    status = snapshot(**changed)
    problems.add_to(status)
    return {each.what: (each.reason, each.for_s) for each in status.problems}


@pytest.mark.parametrize("health", ["starting", "populating"])
def test_daemon_that_is_well_or_on_its_way_says_nothing(health: str) -> None:
    tier = "hbm" if health == "starting" else "dram"
    assert said(Problems(), remote={"state": "starting"}) == {}
    assert said(Problems(), remote={"state": "serving", "reason": ""}) == {}
    reading = {"state": "serving", "read": "on", "epochs_ago_s": 5.0}
    assert said(Problems(), remote=reading) == {}
    assert said(Problems(), remote={**reading, "state": "starting", "epochs_ago_s": -1.0}) == {}
    assert said(Problems()) == {}
    assert said(Problems(), **{f"core__tiers__{tier}__health": health}) == {}


@pytest.mark.parametrize(
    ("changed", "what", "reason"),
    [
        ({"state": "draining"}, "draining", "stores are refused"),
        ({"state": "recovering"}, "recovering", "no stores and no loads"),
        (
            {
                "core__tiers__nvme__health": "read_only",
                "core__tiers__nvme__reason": "no space left",
            },
            "nvme read only",
            "no space left",
        ),
        ({"core__tiers__dram__health": "cannot grow: full"}, "dram not ok", "cannot grow: full"),
        (
            {"core__tiers__hbm__health": "waiting", "core__tiers__hbm__reason": "no room"},
            "hbm waiting",
            "no room",
        ),
        (
            {"service__ledger_health": "in_memory", "service__ledger_reason": "no space"},
            "ledger in memory",
            "no space",
        ),
        ({"service__paths_reason": "the socket"}, "files removed", "the socket"),
        ({"core__index__bound": True}, "index too small", "--index-pages"),
        ({"remote": {"state": "refused", "reason": "403"}}, "remote refused", "403"),
        ({"remote": {"state": "failing"}}, "remote failing", "kvwarehouse remote check"),
        ({"remote": {"state": "full"}}, "remote full", "--remote-capacity"),
        ({"remote": {"state": "off"}}, "remote off", "remote_worker_ended"),
        ({"remote": {"state": "serving", "epochs_owed": 2}}, "remote clears owed", "2 of this"),
        ({"remote": {"state": "serving", "epochs_owed": 1}}, "remote clears owed", "clear --all"),
        (
            {"remote": {"state": "serving", "read": "on", "epochs_ago_s": 40.0}},
            "remote not read",
            "cleared",
        ),
        (
            {"remote": {"state": "serving", "read": "on", "epochs_ago_s": -1.0}},
            "remote not read",
            "cleared",
        ),
        (
            {"remote": {"state": "serving", "reason": "why", "read": "on", "epochs_ago_s": -1.0}},
            "remote not read",
            "why",
        ),
    ],
)
def test_problem_says_what_and_why(changed: dict[str, Any], what: str, reason: str) -> None:
    found = said(Problems(), **changed)
    assert list(found) == [what]
    assert reason in found[what][0]


def test_daemon_before_its_core_runs_has_one_problem() -> None:
    early = status_pb2.Status(state="recovering")
    Problems().add_to(early)
    assert [each.what for each in early.problems] == ["recovering"]


def test_age_is_each_problem_s_own_and_ends_with_it() -> None:
    clock = Clock()
    problems = Problems(clock)
    assert said(problems, state="draining")["draining"][1] == 0.0
    clock.now_s += 30
    both = {"state": "draining", "core__index__bound": True}
    said(problems, **both)
    clock.now_s += 12
    ages = {what: for_s for what, (_, for_s) in said(problems, **both).items()}
    assert ages == {"draining": 42.0, "index too small": 12.0}
    assert list(said(problems, core__index__bound=True)) == ["index too small"]
    assert said(problems, state="draining")["draining"][1] == 0.0, "it came back, and is new"


def test_age_goes_on_where_the_reason_changes() -> None:
    clock = Clock()
    problems = Problems(clock)
    said(problems, core__tiers__dram__health="cannot grow: 1 GiB is missing")
    clock.now_s += 5
    found = said(problems, core__tiers__dram__health="cannot grow: 2 GiB are missing")
    assert found["dram not ok"] == ("cannot grow: 2 GiB are missing", 5.0)

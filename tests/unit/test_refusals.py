"""Refused calls: each is counted, and whoever asks cannot fill the log."""

from __future__ import annotations

import io
import json

from kvwarehouse.daemon.admission import Refusals
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.repeats import TOLD_EVERY_S


def test_refusals_are_told_by_reason_at_a_bounded_rate_and_none_is_left_out() -> None:
    out, now = io.StringIO(), 0.0
    refusals = Refusals(Log("json", out), clock=lambda: now)

    def told() -> list[tuple[str, int, str]]:
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        return [(line["reason"], line["count"], line["last_from"]) for line in lines]

    refusals.look()
    assert told() == []
    for number in range(100):
        refusals.count("bad_token", f"ipv4:10.0.0.1:{number}")
        refusals.look()
    refusals.count("what nobody thought of", "unix:")
    refusals.look()
    assert told() == [("bad_token", 1, "ipv4:10.0.0.1:0"), ("other", 1, "unix:")]
    now += TOLD_EVERY_S
    refusals.look()
    refusals.look()
    assert told()[2:] == [("bad_token", 99, "ipv4:10.0.0.1:99")]
    assert (refusals.counts["bad_token"], refusals.counts["other"]) == (100, 1)

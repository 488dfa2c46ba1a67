"""Lines between the daemon and its remote worker: what is exactly so goes over, all else is
refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvwarehouse.errors import InternalError
from kvwarehouse.remote import report
from kvwarehouse.remote.report import (
    EPOCHS_END,
    ClearTold,
    ClearWritten,
    EpochsFound,
    EpochsHeard,
    EpochsKnown,
    WorkerEvent,
    WorkerReport,
    WorkerSettings,
)

SETTINGS = WorkerSettings(
    link_fd=7,
    get_link_fd=8,
    socket="/run/kvw/socket",
    presence_path="/dev/shm/kvw/presence",
    fleet_id="0123456789abcdef" * 2,
    node=(1 << 64) - 1,
    url="s3://bucket/prefix",
    endpoint="",
    region="eu-central-1",
    ca_file="",
    connect_s=0.3,
    get_deadline_s=1.5,
    put_deadline_s=10.0,
    puts=2,
    gets=8,
    read=True,
    write_bytes_per_s=0,
    write="reused",
    capacity_bytes=1 << 40,
    ttl_days=7,
    objects=1_000_000,
)
REPORT = WorkerReport(
    state="failing",
    reason="the store gave no answer; look whether it runs",
    used_bytes=1 << 33,
    objects=1000,
    objects_max=1_000_000,
    nodes=3,
    puts={"stored": 12, "no_room": 1},
    put_bytes=1 << 30,
    gets={"filled": 9, "missing": 2, "damaged": 1},
    get_bytes=1 << 28,
    damaged={"digest": 1},
    read_bytes_per_s=90 << 20,
    first_byte_ms=12.5,
    epochs_ago_s=3.5,
    deleted_objects=4,
    breaker_opened=1,
    listed_ago_s=12.5,
)
SPACE = "fedcba9876543210" * 2
SAID = [EpochsFound(3, 1, {SPACE: EPOCHS_END - 1}), ClearWritten(SPACE, 7, 5, 3)]
TOLD = [ClearTold(SPACE, 5), EpochsKnown({SPACE: 7}), EpochsHeard(3)]


def changed(line: bytes, **values: object) -> bytes:
    return json.dumps({**json.loads(line), **values}).encode()


def without(line: bytes, name: str) -> bytes:
    return json.dumps({key: v for key, v in json.loads(line).items() if key != name}).encode()


def test_settings_and_reports_and_events_go_over_and_are_what_they_were() -> None:
    event = WorkerEvent("remote_failing", {"code": "remote_failed", "after_s": 1.5, "calls": 5})

    assert WorkerSettings.from_line(SETTINGS.to_line()) == SETTINGS
    assert report.read_line(REPORT.to_line()) == REPORT
    assert report.read_line(WorkerReport("starting").to_line()) == WorkerReport("starting")
    assert report.read_line(event.to_line()) == event
    assert all(line.to_line().count(b"\n") == 1 for line in (SETTINGS, REPORT, event))


def test_a_newline_in_a_text_stays_within_its_line() -> None:
    said = replace(REPORT, reason="one\ntwo")

    assert said.to_line().count(b"\n") == 1
    assert report.read_line(said.to_line()) == said


@pytest.mark.parametrize("name", json.loads(SETTINGS.to_line()))
def test_settings_without_one_of_their_fields_are_refused(name: str) -> None:
    with pytest.raises(InternalError, match=name):
        WorkerSettings.from_line(without(SETTINGS.to_line(), name))


@pytest.mark.parametrize("name", json.loads(REPORT.to_line()))
def test_a_report_without_one_of_its_fields_is_refused(name: str) -> None:
    with pytest.raises(InternalError, match=name):
        WorkerReport.from_line(without(REPORT.to_line(), name))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("newer", 1),
        ("kind", "settings"),
        ("state", "off"),
        ("state", 3),
        ("reason", None),
        ("used_bytes", -1),
        ("used_bytes", 1 << 64),
        ("used_bytes", 1.0),
        ("used_bytes", True),
        ("puts", []),
        ("puts", {"stored": -1}),
        ("puts", {"stored": "1"}),
        ("listed_ago_s", "1"),
        ("listed_ago_s", -2),
        ("listed_ago_s", True),
        ("gets", {"filled": -1}),
        ("damaged", ["digest"]),
        ("get_bytes", 1.5),
        ("first_byte_ms", -1),
        ("first_byte_ms", "1"),
        ("read_bytes_per_s", 1.5),
        ("epochs_ago_s", -0.5),
    ],
)
def test_a_report_with_a_field_that_is_not_so_is_refused(name: str, value: object) -> None:
    with pytest.raises(InternalError, match=name) as refused:
        report.read_line(changed(REPORT.to_line(), **{name: value}))

    assert refused.value.code == "remote_line"


@pytest.mark.parametrize(
    ("name", "value"),
    [("fleet_id", "ab"), ("fleet_id", "G" * 32), ("write", "some"), ("puts", "2"), ("more", 1)],
)
def test_settings_with_a_field_that_is_not_so_are_refused(name: str, value: object) -> None:
    with pytest.raises(InternalError, match=name):
        WorkerSettings.from_line(changed(SETTINGS.to_line(), **{name: value}))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"\xff\n",
        b"[]\n",
        b'"report"\n',
        b"{" * 100_000,
        b"[" * 60_000,
        b'{"kind": "event"}',
        b'{"kind": "event", "event": 1}',
        b'{"kind": "event", "event": "x", "fields": {}}',
        b'{"kind": "event", "event": "x", "known": true}',
        changed(REPORT.to_line(), listed_ago_s=float("inf")),
        changed(REPORT.to_line(), reason="x" * report.LINE_BYTES_MAX),
        changed(b'{"kind": "event", "event": "x"}', **{str(number): 1 for number in range(33)}),
    ],
)
def test_what_is_no_line_of_a_worker_is_refused(line: bytes) -> None:
    with pytest.raises(InternalError):
        report.read_line(line)


def test_field_of_an_event_cannot_be_its_name() -> None:
    with pytest.raises(InternalError):
        WorkerEvent("remote_failing", {"event": "ready"})


def test_a_line_that_nobody_would_read_is_not_made() -> None:
    with pytest.raises(InternalError, match="at most"):
        replace(REPORT, reason="x" * report.LINE_BYTES_MAX).to_line()


def test_lines_of_clears_go_over_and_are_what_they_were() -> None:
    assert [report.read_line(line.to_line()) for line in SAID] == SAID
    assert [report.read_told(line.to_line()) for line in TOLD] == TOLD


@pytest.mark.parametrize("line", [*SAID, *TOLD])
def test_lines_of_clears_that_are_not_exactly_so_are_refused(line: Any) -> None:
    read = report.read_line if line in SAID else report.read_told
    good = line.to_line()
    for name in json.loads(good):
        wrong: list[Any] = [None, -1]
        if name == "epoch":
            wrong.append(EPOCHS_END)
        if name == "epochs":
            wrong += [{"x": 1}, {SPACE: EPOCHS_END}, []]
        if name == "namespace":
            wrong += ["", SPACE.upper(), SPACE[1:]]
        for bad in [without(good, name), *(changed(good, **{name: value}) for value in wrong)]:
            with pytest.raises(InternalError):
                read(bad)
    for bad_line in (good + b"x", changed(good, more=1), b"", b"7", b"[]", good * 10_000):
        with pytest.raises(InternalError):
            read(bad_line)


def test_what_is_said_is_not_what_is_told() -> None:
    for line in SAID:
        with pytest.raises(InternalError):
            report.read_told(line.to_line())
    for line in TOLD:
        with pytest.raises(InternalError):
            report.read_line(line.to_line())

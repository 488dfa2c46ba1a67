"""The daemon's log: closed events, bounded lines, nothing secret, never in the way."""

from __future__ import annotations

import io
import json
import os
import pty
import threading

import pytest

from kvwarehouse.daemon import logs
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.repeats import BURST, TOLD_EVERY_S
from kvwarehouse_bench.harness.eventually import DEADLINE_S


def test_event_is_one_json_line_with_its_fields() -> None:
    out = io.StringIO()
    Log("json", out).event(Event.CLEARED, pages=3, text='a "quote"\nand a line', none=None)
    line = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert (line["event"], line["level"], line["pages"]) == ("cleared", "info", 3)
    assert line["text"] == 'a "quote"\nand a line'


def test_text_form_is_one_line_too() -> None:
    out = io.StringIO()
    Log("text", out).event(Event.RPC_FAILED, error="a\nb", count=2)
    assert out.getvalue().count("\n") == 1
    assert "rpc_failed" in out.getvalue()
    assert "count=2" in out.getvalue()


def test_bytes_are_never_shown() -> None:
    out = io.StringIO()
    Log("json", out).event(Event.CLEARED, key=b"secret-bytes", deep={"x": b"secret-bytes"})
    assert "secret" not in out.getvalue()
    assert "12 bytes" in out.getvalue()


def test_line_is_bounded_whatever_its_fields() -> None:
    out = io.StringIO()
    fields = {f"field{number}": "x" * 10**6 for number in range(100)}
    Log("json", out).event(Event.CLEARED, **fields)
    assert len(out.getvalue()) < 100_000


def test_core_events_are_shown_under_one_name_and_cannot_replace_ours() -> None:
    out = io.StringIO()
    Log("json", out).core_events(
        [("page_quarantined", {"tier": "dram", "event": "x", "time": "0"})]
    )
    line = json.loads(out.getvalue())
    assert (line["event"], line["name"], line["tier"]) == ("core", "page_quarantined", "dram")
    assert line["core_event"] == "x"


@pytest.mark.parametrize("form", ["json", "text"])
def test_what_comes_over_and_over_is_said_at_once_and_then_counted(form: str) -> None:
    out, now = io.StringIO(), 0.0
    log = Log(form, out, clock=lambda: now)

    def lines() -> list[str]:
        said = out.getvalue().splitlines()
        out.seek(0)
        out.truncate()
        return said

    for number in range(1000):
        log.core_events([("nvme_write_failed", {"error": "EIO", "segment": str(number)})])
        log.event(Event.RPC_FAILED, error="a bug", number=number)
    log.core_events([("nvme_healed", {})])
    first = lines()
    assert len(first) == 2 * BURST + 1
    assert all("more" not in line for line in first)
    assert "nvme_healed" in first[-1]
    log.tell()
    assert lines() == []
    now += TOLD_EVERY_S
    log.tell()
    counted = lines()
    assert [f"{1000 - BURST}" in line and "999" in line for line in counted] == [True, True]
    assert ["warning" in counted[0], "error" in counted[1]] == [True, True]
    log.event(Event.RPC_FAILED, error="a bug", number=1000)
    assert lines() == []  # it goes on
    log.tell(everything=True)
    (last,) = lines()
    assert "1000" in last
    now += TOLD_EVERY_S
    log.tell()
    log.event(Event.RPC_FAILED, error="a bug", number=1001)
    assert len(lines()) == 1  # it had stopped, and begins anew


def test_what_operators_do_is_said_each_time() -> None:
    out = io.StringIO()
    log = Log("json", out, clock=lambda: 0.0)
    for number in range(10 * BURST):
        log.event(Event.CLEARED, pages=1, epoch=number)
        log.event(Event.EVICTED, pages=1, tiers="all", number=number)
        log.event(Event.NAMESPACE_FORGOTTEN, epoch=number)  # which clients make happen too
    log.tell(everything=True)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    for event, field in ((Event.CLEARED, "epoch"), (Event.EVICTED, "number")):
        numbers = [line[field] for line in lines if line["event"] == event]
        assert numbers == list(range(10 * BURST))
    forgotten = [line for line in lines if line["event"] == Event.NAMESPACE_FORGOTTEN]
    assert len(forgotten) == BURST + 1


def test_trouble_of_the_core_is_a_warning() -> None:
    out = io.StringIO()
    names = ["nvme_write_failed", "nvme_read_only", "nvme_healed", "memory_lost", "not_known_yet"]
    Log("json", out).core_events([(name, {}) for name in names])
    levels = [json.loads(line)["level"] for line in out.getvalue().splitlines()]
    assert levels == ["warning", "warning", "info", "error", "warning"]


def test_stream_that_fails_does_not_stop_the_daemon() -> None:
    out = io.StringIO()
    log = Log("json", out)
    out.close()
    log.event(Event.READY)


def test_reader_that_stands_still_stops_nobody_and_is_told_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incident: whoever had something to log waited for the reader of stderr, with the log's lock:
    the thread that ends stalled calls, that of the signals' stop."""
    monkeypatch.setattr(logs, "_PATIENCE_MS", 1)
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb", buffering=0) as there, os.fdopen(writes, "w") as stream:
        log, said = Log("json", stream), 60
        for number in range(said):
            log.event(Event.CLEARED, number=number, text="x" * 5000, more="y" * 1500)
        read = there.read(1 << 20)
        log.event(Event.READY)
        stream.close()
        lines = (read + there.readall()).splitlines()
    whole = [json.loads(line) for line in lines if line.endswith(b"}")]
    assert len(whole) in (len(lines), len(lines) - 1)  # one may be cut where the pipe was full
    written = [line["number"] for line in whole if line["event"] == "cleared"]
    assert written == list(range(len(written)))
    assert [line["event"] for line in whole[-2:]] == ["log_lines_lost", "ready"]
    assert whole[-2]["lines"] == said - len(written) > 0


def test_terminal_that_stands_still_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has room for some characters, a write of more waits for its reader."""
    monkeypatch.setattr(logs, "_PATIENCE_MS", 1)
    reads, writes = pty.openpty()
    with os.fdopen(reads, "rb", buffering=0) as there, os.fdopen(writes, "w") as stream:
        log = Log("json", stream)

        def say() -> None:
            for number in range(100):
                log.event(Event.CLEARED, number=number, text="x" * 1900, more="y" * 1900)

        saying = threading.Thread(target=say)
        saying.start()
        saying.join(DEADLINE_S)
        waits = saying.is_alive()
        while saying.is_alive():
            there.read(1 << 16)
        assert not waits

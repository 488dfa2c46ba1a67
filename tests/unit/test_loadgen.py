"""What a drive is made of: times, prompts, the order of requests, the stream, what is wrong."""

from __future__ import annotations

import itertools
import json
import math
import random
import socket
from typing import Any

import numpy as np
import pytest

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.errors import InternalError, TransportError, UsageError
from kvwarehouse.loadgen.completion_events import (
    MOST_LINE_BYTES,
    FailedError,
    MalformedError,
    Reading,
    event_data,
    parsed,
)
from kvwarehouse.loadgen.drive import Drive, DriveBounds, DrivePace
from kvwarehouse.loadgen.endpoint import Cutoff, endpoint_of
from kvwarehouse.loadgen.histogram import SPANS, Histogram, Timeline
from kvwarehouse.loadgen.prompts import PromptShape, prompt_of
from kvwarehouse.loadgen.report import DriveFacts, pages_report
from kvwarehouse.loadgen.results import (
    ANSWERED,
    ASKED,
    FIRST_S,
    HITS,
    TOKENS,
    EngineAnswer,
    EngineResults,
)
from kvwarehouse.loadgen.warehouse import WarehouseEngine
from kvwarehouse.types import Loaded, Match, StoreResult
from kvwarehouse.workloads.call import WorkloadCall
from kvwarehouse_bench.harness.eventually import eventually

# --- times ----------------------------------------------------------------------------------------


def test_percentiles_are_within_half_a_percent_of_the_true_ones(rng: random.Random) -> None:
    values = [rng.lognormvariate(-3, 2) for _ in range(20_000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    ordered = sorted(values)
    for percent in (1, 50, 90, 99, 99.9):
        true = ordered[math.ceil(len(values) * percent / 100) - 1]
        assert histogram.percentile(percent) == pytest.approx(true, rel=0.0051)
    assert histogram.figures()["max"] == max(values)
    assert histogram.mean_s == pytest.approx(np.mean(values))


def test_times_outside_the_buckets_are_held_by_the_outer_ones() -> None:
    histogram = Histogram()
    for value in (0.0, 1e-9, 1e6):
        histogram.add(value)
    assert histogram.percentile(50) == pytest.approx(1e-6, rel=0.01)
    assert 60_000 < (histogram.percentile(99) or 0) <= 1e6
    assert histogram.figures()["max"] == 1e6
    assert Histogram().figures()["p50"] is None


def test_timeline_of_a_day_has_as_many_spans_and_the_same_sums(rng: random.Random) -> None:
    timeline, total = Timeline(2), 0.0
    for at in sorted(rng.uniform(0, 86_400) for _ in range(5_000)):
        value = rng.random()
        total += value
        timeline.add(at, 1, value)
    assert len(timeline.rates(0)) <= SPANS
    assert sum(rate for _, rate in timeline.rates(0)) * timeline.span_s == pytest.approx(5_000)
    assert sum(rate for _, rate in timeline.rates(1)) * timeline.span_s == pytest.approx(total)
    for _, mean in timeline.means(1, 0):
        assert 0 < mean < 1


def test_timeline_keeps_what_happened_where_it_happened() -> None:
    timeline, times_s = Timeline(1), (5.5, 70.0, 130.0, 1_000.0)
    for at_s in times_s:
        timeline.add(at_s, 1)
    assert timeline.span_s == 32.0
    ends = [end_s for end_s, rate in timeline.rates(0) if rate]
    assert ends == [32.0 * (at_s // 32 + 1) for at_s in times_s]


def test_times_of_an_answer_are_those_of_their_definitions() -> None:
    answers = EngineResults(begin_s=100.0)
    # Five tokens in four arrivals.
    arrivals = [101.5, 101.6, 101.9, 102.0]
    answers.answer(EngineAnswer(101.0, 102.5, arrivals, 5, 5, 80, 60))
    assert answers.ttft.mean_s == pytest.approx(0.5)
    assert answers.itl.count == 3
    assert answers.itl.mean_s == pytest.approx(0.5 / 3)
    assert answers.tpot.mean_s == pytest.approx(0.5 / 4)
    assert answers.whole.mean_s == pytest.approx(1.5)
    assert (answers.output_tokens, answers.prompt_tokens, answers.cached_tokens) == (5, 80, 60)
    assert answers.timeline.rates(TOKENS)[-1] == (3.0, 5.0)
    assert answers.timeline.means(FIRST_S, ANSWERED) == [(3.0, pytest.approx(0.5))]


def test_reasons_of_failures_are_bounded() -> None:
    answers = EngineResults(begin_s=0.0)
    for at in range(1_000):
        answers.fail(f"http_{at}", "x" * 10_000, 1.0)
    assert len(answers.failures) <= 101
    assert answers.failed == 1_000
    assert max(map(len, answers.details.values())) <= 200


# --- prompts --------------------------------------------------------------------------------------


def test_prompt_has_the_tokens_of_its_blocks_and_equal_blocks_are_equal_tokens() -> None:
    shape = PromptShape(512, 16, first_token=10, end_token=500)
    one = prompt_of(WorkloadCall(0, 1_100, 33, [5, 6, 7]), shape)
    two = prompt_of(WorkloadCall(0, 1_536, 33, [5, 6, 8]), shape)
    assert (len(one.tokens), one.output_tokens) == (69, 3)
    assert (one.tokens[:64] == two.tokens[:64]).all()
    assert (one.tokens[64:] != two.tokens[64:69]).any()
    assert one.tokens.min() >= 10
    assert two.tokens.max() < 500
    assert prompt_of(WorkloadCall(0, 10**6, 33, [5]), shape).tokens.size == 32, (
        "no more than its blocks"
    )
    assert prompt_of(WorkloadCall(0, 0, 0, []), shape).tokens.size == 1
    cut = PromptShape(512, 16, 40, 2, 10, 500)
    assert (prompt_of(WorkloadCall(0, 1_100, 33, [5, 6, 7]), cut).tokens == one.tokens[:40]).all()
    assert prompt_of(WorkloadCall(0, 1_100, 330, [5, 6, 7]), cut).output_tokens == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((512, 7), "does not divide"),
        ((512, 0), "--shrink 0"),
        ((512, 256), "equal by chance"),
        ((512, 1, None, None, 500, 500), "are none"),
    ],
)
def test_prompts_that_cannot_be_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PromptShape(*arguments)


# --- pace -----------------------------------------------------------------------------------------


def calls(*times_s: float) -> Any:
    return iter([WorkloadCall(time_s, 512, 1, [at]) for at, time_s in enumerate(times_s)])


def bounds(**changes: Any) -> DriveBounds:
    given: dict[str, Any] = {
        "workers": 1,
        "speed": 2.0,
        "requests": None,
        "duration_s": None,
        "deadline_s": 9.0,
    }
    return DriveBounds(**{**given, **changes})


def test_open_loop_keeps_the_times_of_the_trace_and_says_how_late_it_is() -> None:
    now = [50.0]
    pace = DrivePace(calls(7.0, 8.0, 9.0), bounds(), lambda: now[0])
    late = []
    for at in (50.0, 50.5, 53.0):  # due at 50, 50.5, 51
        now[0] = at
        taken = pace.take()
        assert taken is not None
        late.append(taken[1])
    assert late == [0.0, 0.0, 2.0]
    assert pace.take() is None


def test_requests_and_duration_end_a_drive() -> None:
    pace = DrivePace(calls(*range(9)), bounds(speed=None, requests=2), lambda: 0.0)
    assert [pace.take() is not None for _ in range(3)] == [True, True, False]
    now = itertools.chain([0.0], itertools.repeat(0.99))
    pace = DrivePace(calls(0, 1, 9), bounds(duration_s=1.0), lambda: next(now))
    # Due at 0, 0.5 and 4.5 s.
    assert [pace.take() is not None for _ in range(3)] == [True, True, False]


def test_what_a_request_raises_ends_the_drive_and_is_raised() -> None:
    class Broken:
        def ask(self, request: WorkloadCall, deadline_s: float) -> None:
            raise KeyError("x")

        def hang_up(self) -> None: ...

    drive = Drive(Broken(), calls(*range(1_000)), bounds(workers=3, speed=None))
    with pytest.raises(InternalError, match="KeyError"):
        drive.run()
    assert drive.under_way == 0
    assert drive.started <= 3


# --- the stream -----------------------------------------------------------------------------------


def events(*parts: bytes) -> list[bytes]:
    left = iter([*parts, b""])
    return list(event_data(lambda: next(left)))


def test_events_are_the_same_however_they_arrive(rng: random.Random) -> None:
    text = b'data: {"a":1}\n\n: comment\nevent: x\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]'
    whole = events(text)
    assert whole == [b'{"a":1}', b"two\nlines", b"[DONE]"]
    cuts = sorted(rng.randrange(len(text)) for _ in range(12))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]) if a < b]
    assert events(*parts) == whole


def test_line_without_end_is_refused() -> None:
    with pytest.raises(MalformedError, match="bytes"):
        list(event_data(lambda: b"x" * (MOST_LINE_BYTES // 2 + 1)))


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b"\xff", b""])
def test_event_that_is_no_json_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        parsed(data)


@pytest.mark.parametrize(
    "event", [7, {}, {"choices": 3}, {"choices": [4]}, {"usage": 3}, {"object": "x"}]
)
def test_event_of_no_completion_is_malformed(event: Any) -> None:
    with pytest.raises(MalformedError):
        Reading(3).take(event, 0.0)


def test_odd_usage_is_no_usage() -> None:
    for usage in (
        {"completion_tokens": "3"},
        {"completion_tokens": -1},
        {"completion_tokens": True},
    ):
        reading = Reading(1)
        reading.take({"choices": [{"text": "w", "finish_reason": "length"}], "usage": usage}, 1.0)
        assert reading.answer(0.0, 2.0).output_tokens is None


def test_last_event_with_no_text_is_no_token() -> None:
    reading = Reading(2)
    for text, finish in (("", None), ("w", None), ("", "length")):
        reading.take({"choices": [{"text": text, "finish_reason": finish}]}, 1.0)
    assert len(reading.answer(0.0, 2.0).arrivals_s) == 2


def test_stream_that_ends_without_an_end_is_cut_off() -> None:
    reading = Reading(9)
    reading.take({"choices": [{"text": "w", "finish_reason": None}]}, 1.0)
    with pytest.raises(FailedError, match="cut_off"):
        reading.answer(0.0, 2.0)


def test_cutoff_ends_a_connection_at_its_time_and_says_why() -> None:
    now = [0.0]
    cutoff = Cutoff(lambda: now[0])
    ours, theirs = socket.socketpair()
    later, other = socket.socketpair()
    with ours, theirs, later, other, cutoff.line(later, 100.0) as kept:
        now[0] = 5.0
        with cutoff.line(ours, 5.0) as line:
            assert ours.recv(1) == b"", "the read ends"
            eventually(lambda: line.cut, "a reason")
            assert (line.cut, kept.cut) == ("deadline", "")
        cutoff.hang_up()
        assert kept.cut == "interrupted"
        assert later.recv(1) == b""
    cutoff.close()


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://h:8000", "h", 8000, "/v1/completions"),
        ("http://h:8000/v1/", "h", 8000, "/v1/completions"),
        ("https://h/api/v1", "h", 443, "/api/v1/completions"),
        ("http://[::1]:9/v1/completions", "::1", 9, "/v1/completions"),
    ],
)
def test_endpoint_is_found_from_the_ways_that_people_write_it(
    url: str, host: str, port: int, path: str
) -> None:
    endpoint = endpoint_of(url)
    assert (endpoint.host, endpoint.port, endpoint.path) == (host, port, path)
    assert (endpoint.tls is not None) == url.startswith("https")


# --- the daemon as the engine ---------------------------------------------------------------------


class _FakeDaemon:
    """One namespace: everything is hit, and loaded as `fill` says. The last `remote` pages of a
    prompt are in the remote store, the others in DRAM."""

    def __init__(self, fill: Any, remote: int = 0) -> None:
        self.fill = fill
        self.remote = remote

    def open(self, space: Any) -> Any:
        return self

    def lookup(self, tokens: Any) -> Match:
        pages = len(tokens) // 512
        tiers = {"hbm": 0, "dram": pages - self.remote, "nvme": 0, "remote": self.remote}
        return Match(pages, pages * 512, tiers)

    def load(self, tokens: Any, out: Any, first: int, timeout_s: float) -> Loaded:
        return Loaded(self.fill(out))

    def store(self, tokens: Any, pages: Any, first: int, timeout_s: float) -> StoreResult:
        return StoreResult(0, len(pages), {})


def warehouse_engine(fill: Any, remote: int = 0) -> WarehouseEngine:
    client: Any = _FakeDaemon(fill, remote)
    return WarehouseEngine(client, PromptShape(512), 4096)


def test_page_of_another_block_is_counted_as_wrong() -> None:
    engine = warehouse_engine(len)  # says that it has filled them, and has not
    engine.ask(WorkloadCall(0, 2_048, 1, [1, 2, 3, 4]), 9.0)
    assert engine.pages.counts["wrong"] == 4


def test_pages_that_the_remote_store_has_are_hits() -> None:
    # They were loaded, and counted as missed.
    engine = warehouse_engine(lambda out: 4, remote=3)
    calls = iter([WorkloadCall(0, 2_048, 1, [1, 2, 3, 4])])
    drive = Drive(engine, calls, bounds(speed=None))
    drive.run()
    report = pages_report(engine.pages, drive, DriveFacts("a daemon", "a trace", "closed"))
    found = report.figures
    assert (found["pages"]["hit_dram"], found["pages"]["hit_remote"]) == (1, 3)
    assert found["pages"]["loaded"] == 4
    assert found["hit_rate"] == 1
    assert found["tiers"]["remote"]["hit_rate"] == 0.75
    (pages,) = (table for table in report.tables if table.title == "Pages")
    shown = {row[0]: row[1] for row in pages.rows}
    assert (shown["hit in dram"], shown["probably in the store"], shown["missed"]) == (1, 3, 0)
    assert engine.pages.timeline.means(HITS, ASKED)[0][1] == 1


def test_request_that_is_interrupted_counts_no_pages() -> None:
    def fill(out: Any) -> int:
        engine.hang_up()
        return 0

    engine = warehouse_engine(fill)
    engine.ask(WorkloadCall(0, 2_048, 1, [1, 2, 3, 4]), 9.0)
    assert (engine.pages.interrupted, engine.pages.served, engine.pages.failed) == (1, 0, 0)


def test_daemon_that_goes_away_is_a_failure_by_its_code() -> None:
    def gone(out: Any) -> int:
        raise TransportError("it is gone", code="lost")

    engine = warehouse_engine(gone)
    engine.ask(WorkloadCall(0, 2_048, 1, [1, 2, 3, 4]), 9.0)
    assert engine.pages.failures == {"lost": 1}
    assert engine.pages.details == {"lost": "it is gone"}


# --- the command line -----------------------------------------------------------------------------


HTTP = ("--engine", "http://127.0.0.1:9", "--model", "m")
DAEMON = ("--engine", "unix:///nowhere")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("chat", *HTTP), "chat has no end; give --requests or --duration"),
        (("sonnet", *HTTP), "there is no trace sonnet"),
        (("chat", "--engine", "http://h:1", "--requests", "1"), "--model is missing"),
        (("chat", "--engine", "ftp://h", "--model", "m", "--requests", "1"), "'ftp://h'"),
        (("chat", "--engine", "http://h:x", "--model", "m", "--requests", "1"), "'http://h:x'"),
        (("chat", "--engine", "http://a:b@h", "--model", "m", "--requests", "1"), "--api-key-file"),
        (("chat", *HTTP, "--requests", "1", "--page-bytes", "1MiB"), "--page-bytes is not for"),
        (("chat", *DAEMON, "--requests", "1", "--model", "m"), "--model is not for a daemon"),
        (("chat", *HTTP, "--requests", "0"), "--requests 0"),
        (("chat", *HTTP, "--requests", "1", "--concurrency", "0"), "--concurrency 0"),
        (("chat", *HTTP, "--requests", "1", "--speed", "0"), "--speed 0"),
        (("chat", *HTTP, "--requests", "1", "--deadline", "2d"), "--deadline '2d'"),
        (("chat", *HTTP, "--requests", "1", "--token-ids", "5"), "--token-ids 5"),
        (("chat", *HTTP, "--requests", "1", "--shrink", "7"), "--shrink 7 does not divide"),
        (("chat", *HTTP, "--requests", "1", "--token-seed", "-1"), "--token-seed -1"),
        (("chat", *HTTP, "--requests", "1", "--again"), "--again is for traces"),
        (("chat", *HTTP, "--requests", "1", "--api-key-file", "/none"), "/none cannot be read"),
        (("chat", *HTTP, "--requests", "1", "--documents", "2"), "--documents is not for chat"),
        (("TRACE", *HTTP, "--seed", "2"), "--seed is for workloads"),
        (("TRACE", *HTTP, "--again"), "--again has no end"),
        (("TRACE", *HTTP, "--block-tokens", "0"), "--block-tokens 0"),
    ],
)
def test_drive_refuses_and_names_the_value(
    arguments: tuple[str, ...], said: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text(json.dumps({"timestamp": 0, "hash_ids": [1]}) + "\n")
    given = [str(trace) if each == "TRACE" else each for each in arguments]
    assert main(["drive", *given]) == Exit.USAGE
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""

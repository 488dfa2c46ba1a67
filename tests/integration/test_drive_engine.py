"""`kvwarehouse drive` against an HTTP server: a contract double that answers well, and badly."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from testkit.completion_server import CompletionServer

SMALL = ("--shrink", "16", "--most-output-tokens", "6", "--progress", "0")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Three requests 10 ms apart: the second begins with the first, the third with its root."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 10 * at, "input_length": length, "output_length": 64, "hash_ids": ids}
        for at, (length, ids) in enumerate([(1_024, [1, 2]), (1_500, [1, 2, 3]), (1_000, [1, 4])])
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def drive(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs it against a server; returns its exit status and what --json printed."""

    def run(server: CompletionServer, source: str, *arguments: str) -> tuple[int, Any]:
        given = ["drive", source, "--engine", server.url, "--model", "m", *SMALL, "--json"]
        status = main([*given, *arguments])
        return status, json.loads(capsys.readouterr().out)

    return run


# --- good answers ---------------------------------------------------------------------------------


def test_equal_ids_are_equal_prefixes_on_the_wire(drive: Any, trace: str) -> None:
    with CompletionServer() as server:
        assert drive(server, trace, "--concurrency", "1")[0] == Exit.OK
    first, second, third = (body["prompt"] for body in server.asked)
    assert [len(first), len(second), len(third)] == [64, 94, 63]
    assert second[:64] == first
    assert third[:32] == first[:32]
    assert third[32:] != first[32:63]
    for body in server.asked:
        assert (body["model"], body["stream"], body["ignore_eos"]) == ("m", True, True)
        assert body["max_tokens"] == 4
        assert all(1_000 <= token < 30_000 for token in body["prompt"])


def test_times_rates_and_cached_tokens_are_reported(drive: Any, trace: str, tmp_path: Path) -> None:
    page = tmp_path / "drive.html"
    with CompletionServer("cached") as server:
        status, found = drive(server, trace, "--speed", "10", "--html", str(page))
    assert status == Exit.OK
    assert found["requests"] == {
        "started": 3,
        "answered": 3,
        "failed": 0,
        "interrupted": 0,
        "short": 0,
    }
    assert found["tokens"]["output"] == 12
    assert found["tokens"]["prompt"] == 64 + 94 + 63
    assert found["tokens"]["cached"] == 32 + 47 + 31
    assert found["tokens"]["cached_share"] == pytest.approx(110 / 221)
    seconds = found["seconds"]
    # Four tokens are three gaps; each answer has one first token and one mean.
    assert [seconds[name]["count"] for name in ("ttft", "itl", "tpot", "whole")] == [3, 9, 3, 3]
    for name in ("ttft", "whole"):
        assert 0 < seconds[name]["p50"] <= seconds[name]["p99"] <= seconds[name]["max"]
    assert seconds["late"]["count"] == 3
    assert found["rates"]["output_tokens_per_s"] > 0
    assert page.read_text().count("<svg") == 4


def test_table_says_the_same(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with CompletionServer("cached", "status", "cached") as server:
        given = ["drive", trace, "--engine", server.url + "/v1", "--model", "m", *SMALL]
        assert main([*given, "--concurrency", "1"]) == Exit.FOUND
    shown = capsys.readouterr().out
    for word in ("TTFT", "ITL", "TPOT", "p99", "http_500", "the engine is dead", "49."):
        assert word in shown


def test_server_without_usage_has_its_tokens_counted(drive: Any, trace: str) -> None:
    with CompletionServer("plain") as server:
        _, found = drive(server, trace, "--concurrency", "2")
    assert found["tokens"] == {"output": 12, "prompt": None, "cached": None, "cached_share": None}


def test_answers_that_are_too_short_are_counted(drive: Any, trace: str) -> None:
    with CompletionServer("short", "good") as server:
        _, found = drive(server, trace, "--concurrency", "1")
    assert found["requests"]["short"] == 1
    assert found["seconds"]["tpot"]["count"] == 2


@pytest.mark.parametrize("field", ["ignore_eos", "stream_options"])
def test_field_that_the_server_refuses_is_left_out_and_said(
    drive: Any, trace: str, field: str
) -> None:
    with CompletionServer(f"refuse:{field}") as server:
        status, found = drive(server, trace, "--concurrency", "1")
    assert status == Exit.OK
    assert found["requests"]["answered"] == 3
    assert len(server.asked) == 4, "it was asked with the field once"
    assert any(field in note for note in found["notes"])


def test_closed_loop_has_no_more_under_way_than_it_was_told(trace: str, drive: Any) -> None:
    with CompletionServer("late") as server:

        def let_go() -> None:
            eventually(lambda: len(server.asked) == 2, "two requests under way")
            server.release.set()

        watcher = threading.Thread(target=let_go)
        watcher.start()
        _, found = drive(server, trace, "--concurrency", "2")
        watcher.join()
    assert found["requests"]["answered"] == 3


def test_workload_is_driven_without_a_file_for_as_many_requests(drive: Any) -> None:
    with CompletionServer() as server:
        arguments = ("--requests", "9", "--concurrency", "3", "--most-prompt-tokens", "40")
        status, found = drive(server, "chat", "--seed", "5", *arguments)
    assert status == Exit.OK
    assert found["requests"]["answered"] == 9
    assert {tuple(body["prompt"][:32]) for body in server.asked} == {
        tuple(server.asked[0]["prompt"][:32])
    }, "one root"
    assert max(len(body["prompt"]) for body in server.asked) == 40


def test_trace_again_has_prompts_that_nothing_has_left(drive: Any, trace: str) -> None:
    with CompletionServer() as server:
        drive(server, trace, "--again", "--requests", "7", "--concurrency", "1")
    roots = [tuple(body["prompt"][:32]) for body in server.asked]
    assert len(server.asked) == 7
    assert [len(set(roots[at : at + 3])) for at in (0, 3)] == [1, 1]
    assert len(set(roots)) == 3


def test_another_token_seed_shares_nothing(drive: Any, trace: str) -> None:
    with CompletionServer() as server:
        for seed in ("1", "2", "1"):
            drive(server, trace, "--concurrency", "1", "--token-seed", seed, "--requests", "1")
    first, other, again = (body["prompt"] for body in server.asked)
    assert first == again
    assert first[:4] != other[:4]


def test_key_goes_with_every_request(drive: Any, trace: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with CompletionServer() as server:
        drive(server, trace, "--concurrency", "1", "--api-key-file", str(key))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


# --- bad answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manner", "reason", "detail"),
    [
        ("status", "http_500", "the engine is dead"),
        ("refuse:prompt", "http_400", "unexpected field prompt"),
        ("html", "not_a_stream", "It works"),
        ("malformed", "malformed", "not json"),
        ("list", "malformed", "list"),
        ("error", "engine_error", "out of blocks"),
        ("cut", "cut_off", ""),
        ("empty", "no_tokens", ""),
        ("abort", "finish_abort", ""),
        ("silence", "connection_lost", ""),
        ("flood", "too_many_tokens", "4"),
    ],
)
def test_failure_is_counted_by_reason_and_the_others_are_answered(
    drive: Any, trace: str, manner: str, reason: str, detail: str
) -> None:
    with CompletionServer("good", manner, "good") as server:
        status, found = drive(server, trace, "--concurrency", "1")
    assert status == Exit.FOUND
    assert {name: each["count"] for name, each in found["failures"].items()} == {reason: 1}
    assert detail in found["failures"][reason]["first"]
    assert (found["requests"]["answered"], found["requests"]["failed"]) == (2, 1)
    assert found["tokens"]["output"] == 8, "a failed answer has no tokens"
    assert found["seconds"]["ttft"]["count"] == 2


@pytest.mark.parametrize("manner", ["never", "drip"])
def test_answer_without_end_is_cut_at_its_deadline(drive: Any, trace: str, manner: str) -> None:
    with CompletionServer(manner) as server:
        status, found = drive(server, trace, "--concurrency", "3", "--deadline", "300ms")
    assert status == Exit.FOUND
    assert found["failures"]["deadline"]["count"] == 3


def test_duration_ends_what_starts_and_waits_for_what_is_under_way(drive: Any) -> None:
    arguments = ("--duration", "500ms", "--concurrency", "2")
    with CompletionServer() as server:
        status, found = drive(server, "scan", *arguments)
    assert status == Exit.OK
    assert found["requests"]["started"] == found["requests"]["answered"] == len(server.asked)


def test_interrupt_prints_what_there_is(trace: str) -> None:
    with CompletionServer("good", "never") as server:
        command = [sys.executable, "-P", "-m", "kvwarehouse", "drive", trace]
        command += ["--engine", server.url, "--model", "m", *SMALL, "--json", "--speed", "10"]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        eventually(lambda: len(server.asked) == 3, "all requests under way")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == Exit.INTERRUPTED, err
    found = json.loads(out)
    assert found["was_interrupted"]
    assert found["requests"]["answered"] + found["requests"]["interrupted"] == 3
    assert found["requests"]["interrupted"] >= 2
    assert found["requests"]["failed"] == 0
    assert b"Traceback" not in err


def test_progress_goes_to_stderr_while_requests_are_under_way(
    drive: Any, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CompletionServer("late") as server:

        class Stderr(io.StringIO):
            def write(self, text: str) -> int:
                if "3 under way" in text:  # the first line may come before they all are
                    server.release.set()
                return super().write(text)

        stderr = Stderr()
        monkeypatch.setattr(sys, "stderr", stderr)
        status, found = drive(server, trace, "--progress", "1ms")
    assert (status, found["requests"]["answered"]) == (Exit.OK, 3)
    assert "0 answered, 0 failed, 3 under way" in stderr.getvalue()


def test_no_server_is_said_before_anything_is_sent(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # held, so that nobody else comes to listen there
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert main(["drive", trace, "--engine", url, "--model", "m"]) == Exit.NO_DAEMON
    assert "no engine at 127.0.0.1" in capsys.readouterr().err

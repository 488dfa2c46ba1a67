"""`kvwarehouse top` as a process of its own: what clients do shows up, a restart of the daemon is
survived, and the terminal is left as it was."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.harness.serving import Serving
from testkit.served import Served
from testkit.tcp import TOKEN, port_of

PAGE_BYTES = 16384
PAGES = 6
SPACE = kvw.Namespace(
    model="alpha", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=PAGE_BYTES
)
TOKENS = range(PAGES * SPACE.page_tokens)
QUICK = ["--interval", "100ms", "--timeout", "60"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kvwarehouse", "top", *QUICK, *arguments]


@contextmanager
def watching(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`top --json`, whose lines are to be read."""
    child = subprocess.Popen(command("--json", *arguments), stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait(DEADLINE_S)
        assert child.stdout is not None
        child.stdout.close()


def looks(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Each object that it prints; an AssertionError when what is waited for does not come."""
    assert child.stdout is not None
    end = time.monotonic() + DEADLINE_S
    for line in child.stdout:
        assert time.monotonic() < end, f"it did not show up: {line}"
        yield json.loads(line)
    raise AssertionError("top ended")


def risen(look: dict[str, Any], part: str, counter: str) -> float:
    """By how much a counter rose within the interval."""
    return float(look["rates"]["core"][part][counter] * look["interval_s"])


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="16MiB", nvme_capacity="64MiB", nvme_segment="4MiB") as serving:
        yield serving


def test_stores_and_loads_show_up_as_rates(serving: Serving) -> None:
    with watching("--socket", serving.socket) as child, serving.connect() as client:
        found = looks(child)
        assert next(found)["reachable"]
        ns = client.open(SPACE)
        pages = np.full((PAGES, PAGE_BYTES), 7, np.uint8)
        assert ns.store(TOKENS, pages, timeout_s=60).stored == PAGES
        assert ns.lookup(TOKENS).pages == PAGES
        assert ns.load(TOKENS, pages, timeout_s=60) == PAGES
        stored = loaded = hit = 0.0
        for look in found:
            stored += risen(look, "stores", "pages_sealed")
            loaded += risen(look, "loads", "bytes_loaded")
            hit += risen(look, "lookups", "pages_hit_dram")
            if look["status"]["core"]["loads"]["bytes_loaded"] == PAGES * PAGE_BYTES:
                break
        assert stored == pytest.approx(PAGES)
        assert loaded == pytest.approx(PAGES * PAGE_BYTES)
        assert hit == pytest.approx(PAGES)
        assert look["hit_rate_run"] == 1.0
    shown = subprocess.run(
        command("--once", "--socket", serving.socket),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    ).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    for word in ("serving", "alpha", SPACE.id.hex()[:12], "100.0% since the start", "96 KiB"):
        assert word in shown, word


def test_restart_of_the_daemon_is_said_and_survived(serving: Serving) -> None:
    with serving.connect() as client:
        client.open(SPACE).store(TOKENS, np.zeros((PAGES, PAGE_BYTES), np.uint8))
    with watching("--socket", serving.socket) as child:
        found = looks(child)
        first = next(found)
        serving.kill()
        gone = next(look for look in found if not look["reachable"])
        assert (gone["status"], gone["rates"]) == (None, {})
        assert serving.socket in gone["reason"]
        serving.start()
        back = next(look for look in found if look["reachable"])
        assert back["restarted"]
        assert back["rates"] == {}
        incarnation = back["status"]["core"]["incarnation"]
        assert incarnation > first["status"]["core"]["incarnation"]
        later = next(look for look in found if look["interval_s"])
        assert not later["restarted"]
        assert later["rates"]["core"]["stores"]["pages_sealed"] == 0.0
        child.send_signal(signal.SIGINT)
        assert child.wait(DEADLINE_S) == Exit.INTERRUPTED


def test_daemon_that_is_gone_at_the_end_is_the_exit_status(serving: Serving) -> None:
    with watching("--count", "40", "--socket", serving.socket) as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["reachable"]
        serving.kill()
        rest = [json.loads(line) for line in child.stdout]
        assert len(rest) == 39
        assert not rest[-1]["reachable"]
        assert child.wait(DEADLINE_S) == Exit.NO_DAEMON


def test_one_frame_comes_over_tcp_with_tls_and_a_token(
    tmp_path: Path,
    certificate: tuple[str, str],
    tokens: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cert, key = certificate
    settings = {"listen": "127.0.0.1:0", "token_file": tokens, "tls_cert": cert, "tls_key": key}
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    with Served(tmp_path, **settings) as served:
        address = ["--address", f"localhost:{port_of(served)}", "--tls", cert]
        assert main(["top", "--once", *QUICK, *address, "--token-file", str(secret)]) == Exit.OK
        said = capsys.readouterr().out
        assert "kvwarehouse default  serving" in said
        assert "16 MiB" in said
        wrong = tmp_path / "wrong"
        wrong.write_text("0" * 32)
        assert main(["top", *QUICK, *address, "--token-file", str(wrong)]) != Exit.OK
        assert "token" in capsys.readouterr().err


def test_without_a_terminal_frames_come_one_below_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Served(tmp_path) as served:
        assert main(["top", *QUICK, "--count", "2", "--socket", served.config.socket]) == Exit.OK
    said = capsys.readouterr().out
    assert said.count("kvwarehouse default") == 2
    assert "\x1b" not in said


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process, and the terminal's other end."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    child = subprocess.Popen(
        command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield child, ours
    finally:
        child.kill()
        child.wait(DEADLINE_S)
        os.close(ours)


def read_until(terminal: int, word: bytes, said: bytes = b"") -> bytes:
    """All that was written, up to where `word` is in it; b"" for `word`: up to the end."""
    end = time.monotonic() + DEADLINE_S
    while not word or word not in said:
        assert time.monotonic() < end, said
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            more = os.read(terminal, 65536)
        except OSError:  # how Linux says that nobody holds the other end any more
            more = b""
        if not more:
            assert not word, said
            return said
        said += more
    return said


@pytest.mark.parametrize(
    ("end", "status"), [("q", Exit.OK), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_live_view_gives_the_terminal_back(tmp_path: Path, end: Any, status: int) -> None:
    with (
        Served(tmp_path) as served,
        on_a_terminal("--socket", served.config.socket) as (child, tty),
    ):
        said = read_until(tty, b"right now")
        assert b"\x1b[?1049h" in said, "a screen of its own"
        if end == "q":
            os.write(tty, b"q")
        else:
            child.send_signal(end)
        said = read_until(tty, b"", said)
        assert child.wait(DEADLINE_S) == status
        assert b"Traceback" not in said
        _, _, left = said.rpartition(b"\x1b[?1049l")
        assert b"right now" in left, "the last frame stays"
        assert said.count(b"\x1b[?25l") == said.count(b"\x1b[?25h"), "the cursor is back"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--interval", "0.01"], "--interval 0.01"),
        (["--interval", "2h"], "'2h'"),
        (["--interval", "often"], "'often'"),
        (["--count", "0"], "--count 0"),
    ],
)
def test_intervals_that_cannot_be_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *arguments, "--socket", "/nowhere/s"]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_no_daemon_at_the_beginning_ends_it_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--socket", "/nowhere/s"]) == Exit.NO_DAEMON
    assert "no daemon at unix:///nowhere/s" in capsys.readouterr().err

"""`make bench-peers` with the peers that need nothing but this environment, with pages so small
that no figure means anything: every work runs, checks what it loaded, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse_bench.peers.contenders import (
    DISK,
    MEMORY,
    ROOT,
    Contender,
    ContenderError,
    ContenderKind,
)
from testkit import tally

SCRIPT = ROOT / "bench" / "peers.py"
FILES = ContenderKind("files", "files", "files.Files")
# A size more is every work once more.
SIZES = {"64KiB": 65536} if tally.rounds(1) == 1 else {"16KiB": 16384, "64KiB": 65536}
SMALL = ("--bytes", "1MiB", "--pages", ",".join(SIZES), "--rounds", "2", "--keys", "64", "--quick")


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, Path]:
    """Figures, what was printed, the folder that it worked in."""
    folder = tmp_path_factory.mktemp("peers")
    out, page = folder / "peers.json", folder / "peers.html"
    work = folder / "work"
    work.mkdir()
    done = bench(
        *("--peers", "files,lmdb,redis", "--dir", str(work), "--json", str(out)),
        *("--html", str(page)),
        *SMALL,
        PATH="/nowhere",  # so that there is no server either
    )
    assert done.returncode == 0, done.stderr
    assert "<svg" in page.read_text()
    return json.loads(out.read_text()), done.stdout, work


def works_of(figures: Any, title: str) -> dict[tuple[str, int], Any]:
    store = next(each for each in figures["stores"] if each["store"] == title)
    return {(each["work"], each["page_bytes"]): each for each in store["works"]}


@pytest.mark.parametrize(("title", "ways"), [("one file a page", 1), ("LMDB", 2)])
def test_every_work_of_a_peer_has_its_rounds(run: Any, title: str, ways: int) -> None:
    works = works_of(run[0], title)
    expected = {("lookup", 4096)} | {
        (work, size)
        for work in ("store", "load", "store one", "durable store", "cold load")
        for size in SIZES.values()
    }
    assert set(works) == expected
    for (work, _), each in works.items():
        assert each["reason"] == ""
        assert all(len(values) == 2 for values in [*each["peer"].values(), *each["ours"].values()])
        if work in ("store", "load", "store one"):
            assert len(each["peer"]) == ways
    assert set(works["load", 65536]["ours"]) == {"verified", "boundary"}


def test_flipped_bytes_are_hits_of_peers_without_checksums_and_our_misses(run: Any) -> None:
    flips = {each["store"]: each["flips"] for each in run[0]["stores"]}
    assert flips["kvwarehouse"]["miss"] == flips["kvwarehouse"]["flipped"] == 4
    for title in ("one file a page", "LMDB"):
        assert flips[title]["wrong"] == 4
    assert all(each["others_right"] == 4 for each in flips.values() if each)


def test_peer_without_its_program_is_a_row_that_says_so(run: Any) -> None:
    redis = next(each for each in run[0]["stores"] if each["store"] == "Redis")
    unpacked = ROOT / ".venv-peers" / "redis" / "usr" / "bin" / "redis-server"
    if unpacked.is_file():  # by make setup-peers: then it is a peer like others
        assert redis["did_not_run"] == {}
        return
    assert "valkey-server" in redis["did_not_run"][MEMORY]
    assert "did not run: neither valkey-server" in run[1]


def test_nothing_is_left_where_it_worked(run: Any) -> None:
    assert list(run[2].iterdir()) == []


def test_peer_that_fails_to_start_says_why(tmp_path: Path) -> None:
    broken = ContenderKind("broken", "Broken", "files.Nothing")
    with pytest.raises(ContenderError) as failed:
        Contender(broken, tmp_path, 1 << 20, MEMORY)
    assert failed.value.kind is broken
    assert "has no attribute 'Nothing'" in failed.value.reason


def test_peer_whose_environment_is_missing_says_which_command_makes_it(tmp_path: Path) -> None:
    away = ContenderKind("away", "Away", "files.Files", environment=ROOT / ".venv-peers" / "away")
    with pytest.raises(ContenderError, match=r"not set up.*make setup-peers"):
        Contender(away, tmp_path, 1 << 20, MEMORY)


def test_peer_whose_setup_failed_says_what_it_said(tmp_path: Path) -> None:
    environment = tmp_path / "peer"
    environment.with_suffix(".failed").write_text("no such package\nfor this system\n")
    away = ContenderKind("away", "Away", "files.Files", environment=environment)
    with pytest.raises(
        ContenderError, match="could not be set up: no such package for this system"
    ):
        Contender(away, tmp_path, 1 << 20, MEMORY)


def test_peer_that_dies_in_a_work_is_an_error_then_and_afterwards(tmp_path: Path) -> None:
    side = Contender(FILES, tmp_path, 1 << 20, DISK)
    os.kill(child_with(str(tmp_path)), signal.SIGKILL)
    with pytest.raises(ContenderError, match=r"its process ended|is gone"):
        side.call("pages", page_bytes=4096)
    with pytest.raises(ContenderError, match="is gone"):
        side.call("pages", page_bytes=4096)


def child_with(argument: str) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"kvwarehouse_bench.peers.client" in line and argument.encode() in line:
            return int(folder.name)
    raise AssertionError(f"no client works in {argument}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--peers", "files,nobody"), "there is no 'nobody'"),
        (("--pages", "1000"), "whole 4 KiB"),
        (("--bytes", "4KiB"), "at least"),
        (("--rounds", "0"), "out of range"),
    ],
)
def test_bad_argument_is_refused_in_a_line(arguments: tuple[str, ...], said: str) -> None:
    done = bench("--quick", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr

"""`kvwarehouse serve` as an operator runs it, and the other commands against it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.gpu import LoadPath, Machine, Rates, select_path

WAIT_S = 60
SPACE = kvw.Namespace(
    model="served", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=4096
)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kvwarehouse", *arguments]


@contextmanager
def served(
    folder: Path, *flags: str, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process, and what it says in its log once it serves."""
    where = ["--socket", str(folder / "kvw.sock"), "--arena-dir", str(folder / "arena")]
    flags = ("--dram", "64MiB", "--http", "off", "--log-format", "json", *flags)
    arguments = command("serve", *where, *flags)
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, **options)
    try:
        assert process.stderr is not None
        yield (
            process,
            next(said for said in map(json.loads, process.stderr) if said["event"] == "ready"),
        )
    finally:
        process.kill()
        process.wait(WAIT_S)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its socket."""
    with served(tmp_path) as (process, ready):
        yield process, ready["socket"]


def test_configuration_with_an_address_may_be_a_pipe(tmp_path: Path) -> None:
    """Incident: it began its process anew after it had read the pipe, and served without."""
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef0123456789abcdef\n")
    tokens.chmod(0o600)
    reader, writer = os.pipe()
    try:
        os.write(writer, f'listen = "127.0.0.1:0"\ntoken_file = "{tokens}"\n'.encode())
        os.close(writer)
        with served(tmp_path, "--config", f"/dev/fd/{reader}", pass_fds=[reader]) as (_, ready):
            assert ready["listen"].startswith("127.0.0.1:")
    finally:
        os.close(reader)


def test_served_warehouse_is_administered_and_ends_with_0(
    serving: tuple[subprocess.Popen[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    process, socket = serving
    with kvw.connect(f"unix://{socket}", timeout_s=WAIT_S) as client:
        stored = client.open(SPACE).store(
            range(40), np.zeros((10, 4096), np.uint8), timeout_s=WAIT_S
        )
        assert stored.stored == 10

    def shown(*arguments: str) -> Any:
        # However busy the machine is.
        within = ["--timeout", str(WAIT_S)]
        assert main([*arguments, "--socket", socket, "--json", *within]) == Exit.OK
        return json.loads(capsys.readouterr().out)

    assert shown("status")["core"]["tiers"]["dram"]["pages"] == 10
    assert shown("ls")["namespaces"][0]["dram_pages"] == 10
    assert len(shown("ls", "served")["pages"]) == 10
    checked = shown("check")
    assert (checked["checked"], checked["damaged"]) == (10, 0)
    assert shown("evict", "served", "--pages", "4") == {"evicted": 4}
    assert shown("clear", "served", "--yes") == {"cleared": 6}
    assert shown("flush")["pending"] == 0
    shown("drain")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


def test_status_says_which_way_nvme_takes_to_this_hosts_gpu(
    serving: tuple[subprocess.Popen[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def shown() -> str:
        assert main(["status", "--socket", serving[1]]) == Exit.OK
        return capsys.readouterr().out

    assert "nvme to gpu" not in shown()
    gpu = Machine(cuda="13.0", devices=["H200"], kvikio="26.10")
    rates = Rates({LoadPath.GDS: 6e9, LoadPath.DRAM: 3e9}, {}, 1 << 30)
    select_path(tmp_path, probe=lambda: gpu, measure=lambda *wanted: rates)
    assert "gds: the fastest that was measured" in shown()


def test_unknown_variable_is_a_warning_in_the_log(tmp_path: Path) -> None:
    environment = {**os.environ, "KVW_DRAN": "1GiB"}
    flags = ["--socket", str(tmp_path / "s"), "--arena-dir", str(tmp_path / "a"), "--http", "off"]
    process = subprocess.Popen(
        command("serve", "--dram", "64MiB", "--log-format", "json", *flags),
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = {}
        for line in map(json.loads, process.stderr):  # nothing else may be among them
            said[line["event"]] = line
            if line["event"] == "ready":
                break
    finally:
        process.kill()
        process.wait(WAIT_S)
    assert said["variable_unknown"]["level"] == "warning"
    assert "did you mean KVW_DRAM?" in said["variable_unknown"]["text"]


@pytest.mark.parametrize(
    ("flags", "environment", "form"),
    [
        ([], {}, "json"),
        (["--log-format", "text"], {}, "text"),
        ([], {"KVW_LOG_FORMAT": "text"}, "text"),
        (["--log-format", "none"], {}, "json"),
    ],
)
def test_start_with_wrong_settings_is_an_event_in_the_log(
    tmp_path: Path, flags: list[str], environment: dict[str, str], form: str
) -> None:
    """Incident: an alert on `start_refused` was silent over a typing error in the configuration."""
    file = tmp_path / "kvwarehouse.toml"
    file.write_text('drm = "64MiB"\n')
    done = subprocess.run(
        command("serve", "--config", str(file), *flags),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == Exit.USAGE
    event, last = done.stderr.splitlines()
    assert last.startswith("kvwarehouse: ")
    if form == "json":
        told = json.loads(event)
        assert (told["event"], told["level"]) == ("start_refused", "error")
        assert last == f"kvwarehouse: {told['text']} [{told['code']}]"
    else:
        assert " start_refused " in event
        assert 'code="bad_config"' in event


@pytest.mark.parametrize("flag", ["--http", "--listen", "--kv-events", "--socket"])
def test_taken_address_is_a_refused_start_and_no_missing_daemon(tmp_path: Path, flag: str) -> None:
    """Incident: it ended with 3, which says that no daemon is there."""
    (tmp_path / "tokens").write_text("0123456789abcdef0123456789abcdef\n")
    (tmp_path / "tokens").chmod(0o600)
    flags = {
        "--socket": str(tmp_path / "kvw.sock"),
        "--arena-dir": str(tmp_path / "arena"),
        "--dram": "16MiB",
        "--http": "off",
    }
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken_beside,
    ):
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        if flag == "--socket":
            taken_beside.bind(str(tmp_path / "kvw.sock.grpc"))
            taken_beside.listen()
        else:
            flags[flag] = f"tcp://{address}" if flag == "--kv-events" else address
        if flag == "--listen":
            flags["--token-file"] = str(tmp_path / "tokens")
        arguments = command("serve", *[word for pair in flags.items() for word in pair])
        ended = subprocess.run(
            arguments, check=False, capture_output=True, text=True, timeout=WAIT_S
        )
    assert ended.returncode == Exit.FAILED
    code = "socket_in_use" if flag == "--socket" else "address_unavailable"
    assert ended.stderr.endswith(f"[{code}]\n")


def test_second_daemon_of_a_directory_is_refused_with_the_owners_pid(
    serving: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, _ = serving
    flags = ["--socket", str(tmp_path / "2.sock"), "--arena-dir", str(tmp_path / "arena")]
    second = subprocess.run(
        command("serve", "--dram", "64MiB", "--http", "off", *flags),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert second.returncode == Exit.FAILED
    assert str(process.pid) in second.stderr.splitlines()[-1]
    assert second.stderr.splitlines()[-1].startswith("kvwarehouse: ")


def test_broken_pipe_of_a_reader_is_a_status_of_its_own_without_complaint(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    """Incident: `check` of much damage exited with 4, and `check | head -1` with 0."""
    _, socket = serving
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command("status", "--socket", socket),
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=WAIT_S,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (Exit.NO_READER, b"")

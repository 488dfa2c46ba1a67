"""`kvwarehouse debug bundle` of a daemon that serves, one that hangs, and one that is gone; and
secrets that are planted wherever a bundle looks."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import bundle
from kvwarehouse.bundle import sources
from kvwarehouse.bundle.collecting import collect
from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.fleet import FleetSecret
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving

IN_FILE, IN_OWN, IN_THEIRS, IN_ENGINES, IN_FLAG, IN_URL, IN_LOG, IN_QUERY, SALT, OF_FLEET = (
    f"planted{name}0by0somebody0here" for name in "ABCDEFGHIJ"
)
WAIT_S = 60.0
PLANTED = (
    IN_FILE, IN_OWN, IN_THEIRS, IN_ENGINES, IN_FLAG, IN_URL, IN_LOG, IN_QUERY, SALT, OF_FLEET,
)  # fmt: skip
TOKENS = range(7_654_321, 7_654_321 + 40)
KV = b"bytes of somebody's KV"


class Bundles:
    """Makes them and reads them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys, self._made = folder, capsys, 0

    def make(self, *arguments: str) -> tuple[dict[str, str], dict[str, Any], str]:
        """(texts by their names, what --json says, everything that was printed or written)"""
        self._made += 1
        path = self._folder / f"bundle{self._made}.tar.gz"
        given = ["debug", "bundle", "-o", str(path), "--json", *arguments]
        assert main(given) == Exit.OK
        printed = self._capsys.readouterr()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with tarfile.open(path) as tar:
            texts = {
                os.path.basename(each.name): tar.extractfile(each).read().decode()  # type: ignore[union-attr]
                for each in tar
            }
        figures = json.loads(printed.out)
        assert figures["file"] == str(path)
        assert figures["size_bytes"] == path.stat().st_size
        assert {each["name"] for each in figures["members"]} == texts.keys() - {"manifest.json"}
        return texts, figures, "".join([printed.out, printed.err, *texts.values()])


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, what answers has the time to. A daemon that hangs is given up
    by --timeout."""
    monkeypatch.setattr(bundle, "collect", lambda each: collect(replace(each, deadline_s=WAIT_S)))
    for name in ("SETTINGS_S", "DOCTOR_S"):
        monkeypatch.setattr(sources, name, WAIT_S)


@pytest.fixture
def bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bundles:
    return Bundles(tmp_path, capsys)


@contextmanager
def daemon(
    folder: Path, environment: Mapping[str, str] = {}, **settings: Any
) -> Iterator[tuple[subprocess.Popen[str], Serving, Path]]:
    """Its process, where things are, and the file of its log."""
    log = folder / "daemon.log"
    serving = Serving(folder, **settings)
    with open(log, "w") as stderr:
        process = subprocess.Popen(
            serving.command(), stderr=stderr, text=True, env={**os.environ, **environment}
        )
    try:
        eventually(lambda: '"ready"' in log.read_text() or process.poll() is not None, "it serves")
        assert process.poll() is None, log.read_text()
        yield process, serving, log
    finally:
        process.kill()
        process.wait()
        serving.remove()


def problems(figures: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["problem"] for each in figures["members"] if each["problem"]}


def test_bundle_of_a_daemon_that_serves_has_all_of_it(tmp_path: Path, bundles: Bundles) -> None:
    with daemon(tmp_path, nvme_capacity="64MiB") as (process, serving, _):
        texts, figures, _ = bundles.make("--socket", serving.socket)
    assert problems(figures) == {}
    assert (figures["pid"], figures["daemon_answers"]) == (process.pid, True)
    assert json.loads(texts["status.json"])["state"] == "serving"
    assert "kvwarehouse_uptime_seconds" in texts["metrics.txt"]
    assert '"event": "ready"' in texts["log.txt"]
    assert f'arena_dir = "{serving.arena_dir}"  # --arena-dir' in texts["settings.toml"]
    assert "Max locked memory" in texts["process.txt"]
    for folder in (serving.arena_dir, serving.nvme_dir):
        assert f"== {folder}\nmode 0700" in texts["directories.txt"]
    assert json.loads(texts["versions.json"])["packages"]["kvwarehouse"]
    assert json.loads(texts["doctor-gpu.json"])["checks"]
    checks = {each["check"]: each for each in json.loads(texts["doctor-host.json"])["checks"]}
    assert f"process {process.pid}" in checks["daemon"]["what"]
    assert str(serving.nvme_dir) in checks["file system"]["what"]
    manifest = json.loads(texts["manifest.json"])
    assert manifest["daemon_answers"]
    assert len(manifest["members"]) == len(figures["members"])


def test_bundle_of_a_daemon_that_hangs_has_what_needs_no_answer(
    tmp_path: Path, bundles: Bundles
) -> None:
    with daemon(tmp_path) as (process, serving, _):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # on a busy machine it goes on behind it
        texts, figures, _ = bundles.make("--socket", serving.socket, "--timeout", "1")
        assert process.poll() is None
        process.send_signal(signal.SIGCONT)
        assert problems(figures).keys() == {"status.json", "metrics.txt"}
        assert not figures["daemon_answers"]
        assert texts["status.json"].startswith("(not there: ")
        assert "T (stopped)" in texts["process.txt"]
        assert "do_signal_stop" in texts["process.txt"] or " T " in texts["process.txt"]
        assert '"event": "ready"' in texts["log.txt"]
        assert 'dram = "16MiB"  # --dram' in texts["settings.toml"]
        with serving.connect() as client:  # and nothing has become of it
            assert client.status()["state"] == "serving"


def test_bundle_of_a_daemon_that_is_gone_has_what_is_named(
    tmp_path: Path, bundles: Bundles
) -> None:
    config = tmp_path / "kvw.toml"
    config.write_text('dram = "16MiB"\nhttp = "off"\n')
    with daemon(tmp_path) as (process, serving, log):
        process.terminate()
        assert process.wait() == 0
        given = ["--socket", serving.socket, "--config", str(config), "--log", str(log)]
        texts, figures, _ = bundles.make(*given)
        assert problems(figures).keys() == {"process.txt", "status.json", "metrics.txt"}
        assert (figures["pid"], figures["daemon_answers"]) == (None, False)
        assert "no daemon" in texts["process.txt"]
        assert '"event": "stopped"' in texts["log.txt"]
        assert f'dram = "16MiB"  # {config}' in texts["settings.toml"]
        without = problems(bundles.make("--socket", serving.socket)[1])
        assert without.keys() == {"process.txt", "status.json", "metrics.txt", "log.txt"}


def test_secrets_are_in_no_bundle_wherever_they_are_planted(
    tmp_path: Path, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# whose\n{IN_FILE}\n")
    tokens.chmod(0o600)
    fleet = tmp_path / "fleet"
    fleet_bytes = b"\xff\x00of a fleet\n" + OF_FLEET.encode() + b"\n" + bytes(range(128, 160))
    fleet.write_bytes(fleet_bytes)
    fleet.chmod(0o600)
    theirs = {"KVW_PASSWORD": IN_THEIRS, "VLLM_API_KEY": IN_ENGINES}
    monkeypatch.setenv("KVW_TOKEN", IN_OWN)
    monkeypatch.setenv("HF_TOKEN", IN_OWN)
    settings = {
        "listen": "127.0.0.1:0",
        "token_file": str(tokens),
        "fleet_secret": str(fleet),
        "kv_events": f"ipc://{tmp_path}/events",
        "kv_events_topic": f"api_key={IN_FLAG} https://somebody:{IN_URL}@host/x?sig={IN_QUERY}",
    }
    space = kvw.Namespace(
        model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=4096,
        salt=SALT,
    )  # fmt: skip
    with daemon(tmp_path, theirs, **settings) as (_, serving, log):
        page = (KV * 200)[:4096]
        pages = np.frombuffer(page * 10, np.uint8).reshape(10, 4096)
        with serving.connect() as client:
            client.open(space).store(TOKENS, pages)
        with open(log, "a") as more:
            more.write(f'{{"event": "x", "authorization": "Bearer {IN_LOG}", "salt": "{SALT}"}}\n')
            more.write(f"plain {IN_LOG} of GET https://{IN_LOG}@host/?access_token={IN_QUERY}\n")
            more.write(f"token {IN_FILE} and {IN_ENGINES} of somebody; prompt={list(TOKENS)}\n")
            more.write(f"bytes {KV!r} and ids {list(TOKENS)}\n")
            more.write(f"secret={IN_LOG}\n")
            more.write(f"{OF_FLEET} in {fleet_bytes.hex()} and {quote(fleet_bytes)}\n")
        monkeypatch.setenv("SOME_SECRET", IN_LOG)  # known by its variable, wherever it stands
        texts, figures, everything = bundles.make("--socket", serving.socket)
        secrets = [(serving.arena_dir / "identity").read_bytes()]
    assert problems(figures) == {}
    assert [each for each in PLANTED if each in everything] == []
    of_fleet = (fleet_bytes, FleetSecret.derive(fleet_bytes).secret)
    assert [each.hex() for each in of_fleet if each.hex() in everything] == []
    assert str(TOKENS[3]) not in everything
    assert KV.decode()[:9] not in everything
    assert [each.hex() for each in secrets if each[-32:].hex() in everything] == []
    # And it is not empty for that.
    assert "kv_events_topic" in texts["settings.toml"]
    assert str(tokens) in texts["settings.toml"]
    assert json.loads(texts["status.json"])["service"]["fleet_id"] in everything
    assert "namespace_added" in texts["log.txt"]
    assert "KVW_PASSWORD=(redacted)" in texts["environment.txt"]
    assert "VLLM_API_KEY" not in everything


def test_table_says_what_is_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.tar.gz"
    where = ["--socket", str(tmp_path / "none.sock")]
    assert main(["debug", "bundle", "-o", str(path), *where]) == Exit.OK
    told = capsys.readouterr().out
    with tarfile.open(path) as tar:
        names = {os.path.basename(each.name) for each in tar} - {"manifest.json"}
    assert len(names) > 10
    for name in names:
        assert name in told
    assert "not there: no daemon" in told
    assert str(path) in told
    assert main(["debug", "bundle", "-o", str(path), *where]) == Exit.USAGE

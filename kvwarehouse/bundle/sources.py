"""What goes into a bundle, and where it comes from. A daemon may run, be stopped or hang: what can
be had without it is had, and each source says for itself what it could not get.

One owner; not thread-safe, but for the sources themselves, which run one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvwarehouse.bundle import host_texts, own_commands, packages, settings_in_effect
from kvwarehouse.bundle.collecting import BundleSource
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.client.endpoint import parse_address
from kvwarehouse.config import ENVIRONMENT_PREFIX
from kvwarehouse.errors import UsageError
from kvwarehouse.host import daemon_process

DOCTOR_S: Final = 30.0
"""Of one run of the doctor that imports no engine."""

ENGINE_DOCTOR_S: Final = 120.0

SETTINGS_S: Final = 10.0

LOG_BYTES: Final = 512 << 10

_LOG_LINES: Final = 4000
_METRICS_BYTES: Final = 4 << 20
_SECRET_FILES: Final = ("token_file", "fleet_secret")  # settings
_OTHER_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GRPC_VERBOSITY", "LD_PRELOAD",
    "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "PYTHONPATH", "VIRTUAL_ENV",
    "XDG_RUNTIME_DIR", "KUBERNETES_SERVICE_HOST", "container", "INVOCATION_ID",
)  # fmt: skip


@dataclass(frozen=True)
class BundleRequest:
    address: str
    token: str | None = None
    tls: bool | str | None = None
    timeout_s: float = 5.0
    config: str | None = None
    """The file of a daemon whose process cannot be looked at."""
    name: str | None = None
    """Of that daemon."""
    log: str | None = None
    """A file with its log."""
    engine: str | None = None
    """Whose doctor is to look too."""


class Sources:
    def __init__(self, asked: BundleRequest, environment: Mapping[str, str]) -> None:
        """environment: this process's."""
        self._asked = asked
        self._own = environment
        self._address = parse_address(asked.address)
        self._pid, self._no_pid = self._find()
        self._settings: dict[str, Any] = {}
        self._status: dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        """Of the daemon's process, where it is one of this host that can be looked at."""
        return self._pid

    @property
    def reachable(self) -> bool:
        """Whether the daemon has answered."""
        return bool(self._status)

    def secrets(self) -> tuple[list[Mapping[str, str]], list[str]]:
        """(environments whose secret variables are to be taken out, lines that are secrets), as
        far as they are known by now."""
        files = []
        for key in _SECRET_FILES:
            variable, flag = ENVIRONMENT_PREFIX + key.upper(), "--" + key.replace("_", "-")
            files += [self._settings.get(key), self._environment().get(variable)]
            if self._pid is not None:  # its settings may not have been had
                files += daemon_process.option_values(self._pid, flag)
        lines = [line for path in files if path for line in _lines_of(str(path))]
        if self._asked.token:
            lines.append(self._asked.token)
        return [self._own, self._environment()], lines

    def all(self) -> list[BundleSource]:
        """In the order in which they are to run: later ones use what earlier ones found."""
        doctors = [self._doctor("host", DOCTOR_S), self._doctor("gpu", DOCTOR_S)]
        if self._asked.engine:
            doctors.append(self._doctor(self._asked.engine, ENGINE_DOCTOR_S))
        return [
            BundleSource("versions.json", "versions of all parts", _versions),
            BundleSource("process.txt", "the daemon's process and its limits", self._process),
            BundleSource(
                "settings.toml", "its settings in effect", self._print_settings, SETTINGS_S + 1
            ),
            BundleSource("environment.txt", "variables that it reads", self._variables),
            BundleSource(
                "status.json", "what it says of itself", self._ask_status, self._patience_s
            ),
            BundleSource("metrics.txt", "its metrics", self._ask_metrics, self._patience_s),
            BundleSource("log.txt", "the end of its log", self._log, 10.0, keep_end=True),
            BundleSource(
                "directories.txt", "its directories: mounts, room, disks", self._directories
            ),
            BundleSource("kernel.txt", "kernel and its settings", host_texts.kernel),
            BundleSource("processors.txt", "processors and NUMA nodes", host_texts.processors),
            BundleSource("memory.txt", "memory and control groups", host_texts.memory),
            *doctors,
        ]

    @property
    def _patience_s(self) -> float:
        return self._asked.timeout_s + 1.0  # the call has its own bound, and says more

    def _find(self) -> tuple[int | None, str]:
        if not self._address.local:
            return None, f"{self._address} is not a socket of this host"
        try:
            return daemon_process.pid_at(self._address.path), ""
        except OSError as error:
            return None, f"no daemon listens at {self._address.path}: {error}"
        except LookupError as error:
            return None, str(error)

    def _found(self) -> int:
        if self._pid is None:
            raise LookupError(self._no_pid)
        return self._pid

    def _environment(self) -> Mapping[str, str]:
        """The daemon's where it can be looked at, else this process's."""
        if self._pid is None:
            return self._own
        try:
            return daemon_process.environment(self._pid)
        except OSError:
            return self._own

    def _process(self) -> str:
        pid = self._found()
        return daemon_process.description(pid) + "\n" + host_texts.cgroup(process=str(pid))

    def _print_settings(self) -> str:
        if self._pid is None:
            if not self._address.local:
                raise LookupError(self._no_pid)
            words = ["--name", self._asked.name] if self._asked.name else []
            words += ["--config", self._asked.config] if self._asked.config else []
            which = "with this file" if self._asked.config else "without a file (see --config)"
            heading = f"# {self._no_pid}\n# A daemon that is started here {which} would have:\n"
            directory = None
        else:
            words, heading = daemon_process.serve_arguments(self._pid), ""
            directory = daemon_process.directory(self._pid)
        text = settings_in_effect.printed(
            words, self._environment(), self._own, directory=directory, timeout_s=SETTINGS_S
        )
        self._settings = settings_in_effect.values_of(text)
        return heading + text

    def _variables(self) -> str:
        given = self._environment()
        kept = [n for n in given if n.startswith(ENVIRONMENT_PREFIX) or n in _OTHER_VARIABLES]
        whose = f"of the daemon, pid {self._pid}" if self._pid else "of this command"
        return f"# {whose}\n" + "".join(f"{name}={given[name]}\n" for name in sorted(kept))

    def _ask_status(self) -> str:
        asked = self._asked
        with connect_grpc(
            asked.address, token=asked.token, tls=asked.tls, timeout_s=asked.timeout_s
        ) as client:
            self._status = client.status()
        return json.dumps(self._status, indent=1, default=_plain) + "\n"

    def _ask_metrics(self) -> str:
        service = self._status.get("service", {})
        where = service.get("http") or (self._settings.get("http") if self._pid else "")
        if not where or where == "off":
            raise LookupError("the daemon has no --http, or its address is not known")
        if str(where).endswith(":0"):
            raise LookupError(f"--http is {where}: the port is in the line `ready` of the log")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{where}/metrics", timeout=self._asked.timeout_s) as answer:
            return str(answer.read(_METRICS_BYTES).decode("utf-8", "backslashreplace"))

    def _log(self) -> str:
        if self._asked.log:
            return _end_of(self._asked.log)
        pid = self._found()
        try:
            return _end_of(daemon_process.log_file(pid))
        except OSError as error:
            return _journal(pid, str(error))

    def _directories(self) -> str:
        there = [str(self._settings.get(key) or "") for key in ("arena_dir", "nvme_dir")]
        socket = str(self._settings.get("socket") or self._address.path)
        there.append(os.path.dirname(socket))
        return host_texts.directories([*there, "/dev/shm"])

    def _tiers(self) -> list[str]:
        """Flags of serve, as its settings have them."""
        keys = ("dram", "nvme_capacity", "arena_dir", "nvme_dir", "remote", "fleet_secret")
        given = {key: self._settings.get(key) for key in keys}
        flags = []
        for key, value in given.items():
            if value not in (None, "", "0B"):
                flags += ["--" + key.replace("_", "-"), str(value)]
        return flags

    def _doctor(self, subject: str, deadline_s: float) -> BundleSource:
        def run() -> str:
            options = ["--timeout", f"{deadline_s - 2:g}"]
            if subject != "gpu" and self._address.local:
                options += ["--address", self._asked.address]
            if subject == "host":
                options += self._tiers()
            ended = own_commands.run(["doctor", subject, "--json", *options], deadline_s)
            if not ended.stdout.strip():
                why = ended.stderr.strip()
                raise UsageError(f"the doctor says nothing: {why}", code="no_doctor")
            return ended.stdout

        return BundleSource(
            f"doctor-{subject}.json", f"kvwarehouse doctor {subject}", run, deadline_s + 1
        )


def _versions() -> str:
    return json.dumps(packages.versions(), indent=1) + "\n"


def _end_of(path: str) -> str:
    """The last whole lines of a file."""
    with open(path, "rb") as file:
        if not file.seekable():
            raise OSError(f"{path} cannot be read from its end")
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        end = file.read(LOG_BYTES)
    if size > LOG_BYTES:
        end = end.partition(b"\n")[2]  # the first may have lost the name of what it says
    return end.decode("utf-8", "backslashreplace")


def _journal(pid: int, why_not: str) -> str:
    """What the systemd journal has of a process. Raises LookupError where it has nothing."""
    command = ["journalctl", f"_PID={pid}", "--no-pager", "-q", "-o", "cat", "-n", f"{_LOG_LINES}"]
    hint = f"{why_not}; name a file with it: --log FILE"
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=8.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LookupError(f"{hint} (journalctl: {error})") from error
    if not ended.stdout.strip():
        raise LookupError(f"{hint} (nor has the journal any)")
    return ended.stdout[-LOG_BYTES:].decode("utf-8", "backslashreplace")


def _lines_of(path: str) -> list[str]:
    """Of a file with secrets, which may be any bytes, and the whole of it; [] where this user
    cannot read it, and nor could we show it."""
    try:
        text = Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines()] + [text]


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)

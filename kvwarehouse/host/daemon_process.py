"""A daemon of this host as the kernel shows it: its process is found by its local socket and looked
at through /proc, so that one that is stopped or hangs can be looked at too. Asks the daemon
nothing. Stateless; thread-safe; `proc` is a parameter for tests.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvwarehouse.errors import UsageError
from kvwarehouse.host.files import read

PROC: Final = Path("/proc")

_CONNECT_S: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_THREADS: Final = 200
_STDERR: Final = 2


def pid_at(path: str) -> int:
    """The process that listens at the local socket `path`. Raises OSError where nobody does,
    LookupError where who does is of another pid namespace (a container's)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(_CONNECT_S)
        end.connect(path)
        given = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid = _CREDENTIALS.unpack(given)[0]
    if not pid:
        raise LookupError(f"who listens at {path} is of another pid namespace; run this within it")
    return int(pid)


def arguments(pid: int, proc: Path = PROC) -> list[str]:
    """Its command line."""
    return read(proc / str(pid) / "cmdline").rstrip("\0").split("\0")


def environment(pid: int, proc: Path = PROC) -> dict[str, str]:
    """As it was started with."""
    pairs = read(proc / str(pid) / "environ").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def serve_arguments(pid: int, proc: Path = PROC) -> list[str]:
    """What it was told behind `kvwarehouse serve`, or what says the same. Raises UsageError where
    it is no such process."""
    given = arguments(pid, proc)
    if "serve" in given:
        return given[given.index("serve") + 1 :]
    if "kvwarehouse.embedded" in given:  # kvwarehouse/embedded/private.py: all is in its file
        return ["--config", str(json.loads(given[-1])["config"])]
    raise UsageError(
        f"process {pid} is not `kvwarehouse serve`: its settings are not known; name its file with"
        " --config",
        code="not_serve",
    )


def option_values(pid: int, option: str, proc: Path = PROC) -> list[str]:
    """The paths that its command line gives an option; [] where it cannot be looked at."""
    try:
        given, base = arguments(pid, proc), directory(pid, proc)
    except OSError:
        return []
    found = [after for word, after in pairwise(given) if word == option]
    found += [word.partition("=")[2] for word in given if word.startswith(f"{option}=")]
    return [os.path.join(base, path) for path in found if path]


def directory(pid: int, proc: Path = PROC) -> str:
    """Where its relative paths begin."""
    return os.readlink(proc / str(pid) / "cwd")


def directories_of(pid: int, proc: Path = PROC) -> tuple[str, str]:
    """(the arena's, that of the NVMe tier), by the files that it has open; "" where there is none,
    or they cannot be looked at."""
    arena = nvme = ""
    try:
        files = _open_files(proc / str(pid))
    except OSError:
        return "", ""
    for file in files:
        folder, name = os.path.split(file.removesuffix(" (deleted)"))
        if name == "arena":
            arena = folder
        elif name.endswith(".seg"):
            nvme = os.path.dirname(folder)
        elif name == "ledger.mdb" and not nvme and folder != arena:
            nvme = folder
    return arena, nvme if nvme != arena else ""


def description(pid: int, proc: Path = PROC) -> str:
    """What it is doing, what it takes, what it may take."""
    folder = proc / str(pid)
    parts = [f"pid {pid}", f"command line: {' '.join(arguments(pid, proc))}"]
    for name in ("status", "limits", "cgroup", "oom_score_adj", "io", "schedstat"):
        parts.append(f"== {folder / name}\n{_read_or_why(folder / name)}")
    parts.append(f"== threads: number, state, where it waits, name\n{_threads(folder)}")
    parts.append(f"== descriptors\n{_descriptors(folder)}")
    return "\n\n".join(parts) + "\n"


def log_file(pid: int, proc: Path = PROC) -> str:
    """The file that its log goes to. Raises OSError where that is no file, saying what it is."""
    link = proc / str(pid) / "fd" / str(_STDERR)
    target = os.readlink(link)
    if not stat.S_ISREG(os.stat(link).st_mode):
        raise OSError(f"the daemon's log goes to {target}, which cannot be read again")
    return str(link)  # also where the file was moved or removed since


def _threads(folder: Path) -> str:
    rows = []
    tasks = sorted((folder / "task").iterdir(), key=lambda task: int(task.name))
    for task in tasks[:_THREADS]:
        line = _read_or_why(task / "stat")
        state = line.rpartition(")")[2].split()[:1] or ["?"]
        waits = _read_or_why(task / "wchan").strip() or "-"
        rows.append(f"{task.name:>8} {state[0]} {waits:<32} {_read_or_why(task / 'comm').strip()}")
    if len(tasks) > _THREADS:
        rows.append(f"and {len(tasks) - _THREADS} more")
    return "\n".join(rows)


def _descriptors(folder: Path) -> str:
    """How many there are, by kind."""
    files = _open_files(folder)
    counts = Counter(os.path.dirname(file) or file.partition(":")[0] for file in files)
    return "\n".join(f"{count:>6} {kind}" for kind, count in counts.most_common(50))


def _open_files(folder: Path) -> list[str]:
    """What the descriptors of a process are, in the order of their names. Raises OSError where it
    cannot be looked at."""
    found = []
    for link in sorted((folder / "fd").iterdir()):
        with suppress(OSError):  # closed since
            found.append(os.readlink(link))
    return found


def _read_or_why(path: Path) -> str:
    try:
        return read(path)
    except OSError as error:
        return f"({error.strerror})"

"""Where things are when nobody says: default paths and shares of this machine. Reads facts of the
machine, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvwarehouse.errors import UsageError
from kvwarehouse.sizes import format_size

# sun_path has 108 bytes with its terminator, and ".grpc" is appended.
MAX_SOCKET_PATH_BYTES = 107 - len(".grpc")

_SHARE_UNIT_BYTES = 64 << 20
_SMALL_UNIT_BYTES = 1 << 20
# Where a control group's memory limit is, by the hierarchy that /proc/self/cgroup names: of
# version 2, and of version 1.
_CGROUP_LIMITS = {
    "": ("/sys/fs/cgroup", "memory.max"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}


def default_socket(environ: Mapping[str, str], name: str) -> str:
    """NAME.sock in the first directory that is this user's own: $XDG_RUNTIME_DIR, /run/user/UID,
    or /tmp/kvwarehouse-UID (which the daemon makes, 0700, and refuses when it is another's)."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    candidates = [runtime] if runtime.startswith("/") else []
    candidates.append(f"/run/user/{os.geteuid()}")
    for candidate in candidates:
        if os.path.isdir(candidate) and os.access(candidate, os.W_OK):
            return os.path.join(candidate, "kvwarehouse", f"{name}.sock")
    return f"/tmp/kvwarehouse-{os.geteuid()}/{name}.sock"


def default_address(environ: Mapping[str, str] | None = None) -> str:
    """The address of a client that was told none: $KVW_ADDRESS, else the socket where this user's
    daemon listens, by $KVW_SOCKET, by $KVW_NAME or by default."""
    environ = os.environ if environ is None else environ
    if environ.get("KVW_ADDRESS"):
        return environ["KVW_ADDRESS"]
    if environ.get("KVW_SOCKET"):
        return f"unix://{os.path.abspath(environ['KVW_SOCKET'])}"
    return f"unix://{default_socket(environ, environ.get('KVW_NAME', 'default'))}"


def check_socket_path(socket: str) -> None:
    length = len(os.fsencode(socket))
    if length > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"--socket {socket!r} has {length} bytes; the kernel takes {MAX_SOCKET_PATH_BYTES} "
            "(and .grpc after it): use a shorter path",
            code="bad_config",
        )


def default_arena_dir(name: str) -> str:
    return f"/dev/shm/kvwarehouse-{os.geteuid()}-{name}"


def default_dram_bytes(arena_dir: str) -> int:
    """An eighth of the memory this process may use, at most half of the arena's file system, in
    whole units of 64 MiB. It depends on sizes and not on what is free, so that a restart beside a
    filled arena chooses the same."""
    share = memory_bytes() // 8
    facts = os.statvfs(existing_parent(arena_dir))
    half = facts.f_blocks * facts.f_frsize // 2
    share = min(share, half) if half else share
    unit = _SHARE_UNIT_BYTES if share >= _SHARE_UNIT_BYTES else _SMALL_UNIT_BYTES
    return share // unit * unit


def memory_bytes() -> int:
    """Memory of the machine, or of the limit of this process's control group (a container's, a
    unit's) where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_limit_bytes(path) for path in cgroup_limits(_read("/proc/self/cgroup"))]
    return min([total, *(limit for limit in limits if limit is not None)])


def cgroup_limits(groups: str) -> list[str]:
    """Files that may hold a memory limit of a process whose /proc/PID/cgroup says `groups`: of its
    own group and of those above, for each binds. A container sees its group as the root, whatever
    path it is told."""
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in _CGROUP_LIMITS.keys() & set(controllers.split(",")):
            root, name = _CGROUP_LIMITS[controller]
            for group in (path, *map(str, Path(path).parents)):
                found.append(os.path.join(root, group.strip("/"), name))
    return found


def _limit_bytes(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: str) -> str:
    """ "" where there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def free_bytes(path: str) -> int:
    """What an unprivileged process may still write to the file system of `path`."""
    facts = os.statvfs(existing_parent(path))
    return facts.f_bavail * facts.f_frsize


def total_bytes(path: str) -> int:
    facts = os.statvfs(existing_parent(path))
    return facts.f_blocks * facts.f_frsize


def existing_parent(path: str) -> str:
    """`path`, or its nearest ancestor that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def mount_of(path: str) -> str:
    """The mount point that `path` is (or will be) on."""
    path = os.path.realpath(existing_parent(path))
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def free_hint(path: str) -> str:
    """What a sensible bound on `path` might be, for an error's text."""
    free = free_bytes(path)
    gigabytes = free * 4 // 5 // 10**9
    offer = f"{gigabytes}GB" if gigabytes else f"{free * 4 // 5 // 10**6}MB"
    return f"{mount_of(path)} has {format_size(free)} free, so for example --nvme-capacity {offer}"

"""Where things are when nobody says, and how large: default paths, and a share of a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvwarehouse.errors import UsageError

# sun_path has 108 bytes with its terminator, and ".grpc" is appended.
MAX_SOCKET_PATH_BYTES = 107 - len(".grpc")

_SHARE_UNIT_BYTES = 64 << 20
_SMALL_UNIT_BYTES = 1 << 20


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


def cache_folder(environ: Mapping[str, str] | None = None) -> str:
    """What of ours can be made again, of this user. It need not be there."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "kvwarehouse")


def default_arena_dir(name: str) -> str:
    return f"/dev/shm/kvwarehouse-{os.geteuid()}-{name}"


def default_dram_bytes(usable_bytes: int, arena_bytes: int) -> int:
    """An eighth of the memory that the daemon may use, at most half of its arena's file system, in
    whole units of 64 MiB. It depends on sizes and not on what is free, so that a restart beside a
    filled arena chooses the same."""
    share = min(usable_bytes // 8, arena_bytes // 2 or usable_bytes)
    unit = _SHARE_UNIT_BYTES if share >= _SHARE_UNIT_BYTES else _SMALL_UNIT_BYTES
    return share // unit * unit

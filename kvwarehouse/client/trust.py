"""Whose daemon a client on its host trusts: this process's own user's, root's, and the one's that
$KVW_DAEMON_UID names. The native client asks the kernel who is at the other end of the local
socket. gRPC lets nobody ask that, so its socket must lie where no stranger could have put it.

Stateless; thread-safe.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvwarehouse.errors import TransportError, UsageError

VARIABLE: Final = "KVW_DAEMON_UID"

# sun_path has 108 bytes, the closing zero among them.
_PATH_BYTES: Final = 107


def daemon_uid(environ: Mapping[str, str] | None = None) -> int | None:
    """Whose daemon is trusted beside ours and root's. UsageError where the variable is no uid."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise UsageError(f"{VARIABLE} is {text!r}; set it to a user's number", code="bad_setting")
    return int(text)


def own_socket(path: str) -> str:
    """`path` without links, where it and every folder on the way are out of strangers' reach, or
    where nothing is there. Else TransportError (code "daemon_untrusted")."""
    trusted = {os.geteuid(), 0, daemon_uid()}
    # Resolved once, and used so: a link could lead elsewhere behind the check.
    real = Path(os.path.realpath(path))
    try:
        for each in (real, *real.parents):
            _refuse_stranger(each, os.lstat(each), trusted)
            if each != real:
                _refuse_writable(each, os.lstat(each).st_mode, nearest=each == real.parent)
    except FileNotFoundError:
        pass  # no daemon, which gRPC says
    except OSError as error:
        raise _untrusted(real, f"cannot be looked at ({error.strerror})") from error
    return str(real) if len(os.fsencode(real)) <= _PATH_BYTES else path


def _refuse_stranger(path: Path, facts: os.stat_result, trusted: set[int | None]) -> None:
    if facts.st_uid not in trusted:
        fix = f"; if it is the right one, set {VARIABLE}={facts.st_uid}"
        raise _untrusted(path, f"belongs to uid {facts.st_uid}", fix)


def _refuse_writable(folder: Path, mode: int, *, nearest: bool) -> None:
    # As the daemon's own check; further up a group is its owner's to choose.
    others = stat.S_IWGRP | stat.S_IWOTH if nearest else stat.S_IWOTH
    if mode & others and not mode & stat.S_ISVTX:
        raise _untrusted(folder, f"has mode {stat.S_IMODE(mode):04o}, so others can write to it")


def _untrusted(path: Path, why: str, fix: str = "") -> TransportError:
    who = daemon_uid()
    who = os.geteuid() if who is None else who
    return TransportError(
        f"{path} {why}, and only a daemon of uid {who} or root is trusted with KV{fix}",
        code="daemon_untrusted",
        retryable=False,
        context={"path": path},
    )

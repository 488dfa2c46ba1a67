"""Whose daemon a client on its host trusts: this process's own user's, root's, and the one's that
$KVW_DAEMON_UID names. The native client asks the kernel who is at the other end of the local
socket. gRPC lets nobody ask that, so its socket must lie where no stranger could have put it.

Stateless; thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from kvwarehouse import trusted_path
from kvwarehouse.errors import TransportError, UsageError

VARIABLE: Final = "KVW_DAEMON_UID"


def daemon_uid(environ: Mapping[str, str] | None = None) -> int | None:
    """Whose daemon is trusted beside ours and root's. UsageError where the variable is no uid."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise UsageError(f"{VARIABLE} is {text!r}; set it to a user's number", code="bad_setting")
    return int(text)


def check_socket(path: str) -> None:
    """Raises TransportError (code "daemon_untrusted") where a stranger could have put the socket
    there, or could put another. Where nothing is there nothing is said."""
    try:
        weak = trusted_path.weak_point(path, _trusted(), group=True)
    except OSError as error:
        raise _untrusted(path, f"cannot be looked at ({error.strerror})") from error
    if weak is not None:
        raise _untrusted(weak.path, weak.why, weak.owner)


def check_owner(path: str) -> None:
    """As check_socket, of the socket alone: before each call, because gRPC connects again by itself
    where a daemon has ended, and in /tmp a stranger can have taken its place. One look."""
    try:
        owner = os.stat(path).st_uid
    except OSError:
        return
    if owner not in _trusted():
        raise _untrusted(path, f"belongs to uid {owner}", owner)


def _trusted() -> set[int | None]:
    return {os.geteuid(), 0, daemon_uid()}


def _untrusted(path: str, why: str, owner: int | None = None) -> TransportError:
    fix = "" if owner is None else f"; if it is the right one, set {VARIABLE}={owner}"
    who = daemon_uid()
    who = os.geteuid() if who is None else who
    return TransportError(
        f"{path} {why}, and only a daemon of uid {who} or root is trusted with KV{fix}",
        code="daemon_untrusted",
        retryable=False,
        context={"path": path},
    )

"""Files that decide who may do what: a configuration, tokens, a key. They are believed only where
nobody but this process's user and root could have written them, and secrets only where nobody else
can read them. What is looked at is the opened file, which no name can be exchanged under, and who
could put another there for the next time.

Stateless; thread-safe.
"""

from __future__ import annotations

import os
import stat

from kvwarehouse import trusted_path
from kvwarehouse.errors import UsageError


def read(path: str, flag: str, *, secret: bool) -> bytes:
    """Its bytes. Raises UsageError that names `flag`, the path and the fix. A secret is a plain
    file; else a pipe will do, and is waited for."""
    try:
        # A pipe with nobody at its other end would be waited for before it can be refused.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if secret else 0))
        with open(fd, "rb") as file:
            problem = _problem(os.fstat(fd), path, secret=secret)
            if not problem:
                return file.read()
    except (OSError, ValueError) as error:  # ValueError: a path with a zero in it
        why = getattr(error, "strerror", error)
        raise _bad(flag, path, f"cannot be read: {why}; check the path") from error
    raise _bad(flag, path, problem)


def _problem(facts: os.stat_result, path: str, *, secret: bool) -> str:
    us, mode = os.geteuid(), stat.S_IMODE(facts.st_mode)
    if facts.st_uid not in (us, 0):
        return (
            f"belongs to uid {facts.st_uid}, who may write to it what he likes, and this process "
            f"runs as uid {us}: chown {us} {path}"
        )
    if secret and not stat.S_ISREG(facts.st_mode):
        return "is not a plain file"
    if secret and mode & 0o027:
        return (
            f"has mode {mode:04o}; a file with a secret must not be readable by others nor "
            f"writable by the group: chmod 600 {path}"
        )
    if mode & 0o002:
        return f"has mode {mode:04o}, so that everybody can write to it: chmod o-w {path}"
    return trusted_path.problem(path)


def _bad(flag: str, path: str, problem: str) -> UsageError:
    return UsageError(f"{flag} {path!r} {problem}", code="bad_config")

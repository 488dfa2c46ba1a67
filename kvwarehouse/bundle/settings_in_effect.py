"""The settings of a daemon, as `kvwarehouse serve --print-config` says them: asked of a process of
its own with the daemon's arguments, variables and directory. Stateless; thread-safe."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from kvwarehouse.bundle import own_commands
from kvwarehouse.config import ENVIRONMENT_PREFIX
from kvwarehouse.errors import UsageError

_ALSO = ("HOME", "XDG_RUNTIME_DIR")  # which decide what paths mean


def printed(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    own: Mapping[str, str],
    *,
    directory: str | None,
    timeout_s: float,
) -> str:
    """TOML. arguments: those behind `serve`. environment: the daemon's; `own`: this process's, for
    all that is no setting. Raises UsageError with what serve said, TimeoutError."""
    theirs = {k: v for k, v in environment.items() if _decides(k)}
    ended = own_commands.run(
        ["serve", *arguments, "--print-config"],
        timeout_s,
        environment={**{k: v for k, v in own.items() if not _decides(k)}, **theirs},
        directory=directory,
    )
    if ended.returncode:
        raise UsageError(
            f"the settings are not good any more, or not here: {ended.stderr.strip()}",
            code="bad_config",
        )
    return ended.stdout


def values_of(text: str) -> dict[str, Any]:
    """Settings by their keys, of what `printed` gives; {} where that is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _decides(name: str) -> bool:
    return name.startswith(ENVIRONMENT_PREFIX) or name in _ALSO

"""What a host has for a remote tier, and what a daemon says of its own. Asks no store: that is
`kvwarehouse remote check`. Stateless."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from kvwarehouse.errors import UsageError
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.host.findings import Finding, fail, ok, warn

_WELL: Final = ("starting", "serving")


@dataclass(frozen=True)
class RemoteFacts:
    url: str = ""
    """Without a query. "": no remote tier."""
    state: str = ""
    """As the daemon says it; "" of one that is not there yet."""
    reason: str = ""
    has_obstore: bool = True
    """In the environment that this runs in."""
    folder_is_there: bool = True
    """Of a URL that is one."""
    secret_problem: str = ""
    """Of the file of --fleet-secret, where a daemon is to be started with one."""


def remote_facts(url: str, fleet_secret: str, status: Mapping[str, Any]) -> RemoteFacts:
    """url, fleet_secret: what a daemon is to be started with; "": the one that runs, as its status
    says. Waits for the file system of a folder."""
    running = status.get("remote") or {}
    if not url:
        url, state = str(running.get("url", "")), str(running.get("state", ""))
        return _facts(url, state, str(running.get("reason", "")), "")
    return _facts(url.partition("?")[0], "", "", _problem_of(fleet_secret))


def _facts(url: str, state: str, reason: str, secret_problem: str) -> RemoteFacts:
    parts = urlsplit(url)
    return RemoteFacts(
        url,
        state,
        reason,
        importlib.util.find_spec("obstore") is not None,
        parts.scheme != "file" or os.path.isdir(unquote(parts.path)),
        secret_problem,
    )


def _problem_of(path: str) -> str:
    if not path:
        return "there is none"
    try:
        FleetSecret.read(path)
    except UsageError as error:
        return error.message
    return ""


def remote_findings(facts: RemoteFacts) -> list[Finding]:
    """None without a remote tier."""
    if not facts.url:
        return []
    check = "remote tier"
    found = []
    if not facts.has_obstore:
        found.append(
            fail(
                check,
                f"obstore is not installed here, and the worker of {facts.url} needs it",
                "pip install 'kvwarehouse[remote]' in the environment of the daemon",
            )
        )
    elif not facts.folder_is_there:
        found.append(
            fail(
                check,
                f"{facts.url} is no folder of this host: a mount may have failed",
                "mount it, or make the folder if it is to be a new one",
            )
        )
    elif facts.state not in ("", *_WELL):
        reason = facts.reason or "its log says why"
        found.append(
            warn(check, f"{facts.url} is {facts.state}: {reason}", "kvwarehouse remote check")
        )
    else:
        found.append(ok(check, f"{facts.url} {f'is {facts.state}' if facts.state else 'is named'}"))
    if facts.secret_problem:
        found.append(
            fail(
                "fleet secret",
                f"the hosts of a remote tier need one secret: {facts.secret_problem}",
                "make it once, with (umask 077; openssl rand -hex 32 > FILE), copy that file to"
                " all hosts, and name it with --fleet-secret",
            )
        )
    return found

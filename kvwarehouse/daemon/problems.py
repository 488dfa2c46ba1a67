"""What works worse than it was set up to, why, and for how long: made of a snapshot, so that
`status`, `top` and whoever asks over gRPC say the same of a daemon, in the same words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvwarehouse.wire import status_pb2

LOOK_EVERY_S: Final = 5.0
"""How often the daemon looks by itself, so that a problem's age does not begin when somebody asks.
Well above what a snapshot takes of the core's thread."""

_FINE: Final = {
    "hbm": ("", "off", "starting", "ok"),
    "dram": ("", "populating", "ok"),
    "nvme": ("", "off", "ok"),
    # Of a remote tier that is there; one that is off was asked for.
    "remote": ("", "starting", "serving"),
}
_REMOTE_ADVICE: Final = {
    "failing": "look at the network and the store (kvwarehouse remote check)",
    "refused": "look at its credentials and at the policy of the bucket",
    "full": "a larger --remote-capacity, a smaller --remote-ttl, or room in the store",
    "off": "the log says how its worker ended (remote_worker_ended)",
}
_EPOCHS_FRESH_S: Final = 15.0
"""Where the fleet's clears were not asked for as long, nothing is read from the store."""


class Problems:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}

    def add_to(self, status: status_pb2.Status) -> None:
        """All that the snapshot shows, each with its age. One that is not in it has ended."""
        found = list(_found(status))
        with self._lock:
            now_s = self._clock()
            self._since = {what: self._since.get(what, now_s) for what, _ in found}
            for what, reason in found:
                status.problems.add(what=what, reason=reason, for_s=now_s - self._since[what])


def _found(status: status_pb2.Status) -> Iterator[tuple[str, str]]:
    if status.state == "draining":
        yield "draining", "stores are refused, loads go on"
    elif status.state != "serving":
        yield status.state, "no stores and no loads"
    tiers = status.core.tiers
    for name, health, reason in (
        ("hbm", tiers.hbm.health, tiers.hbm.reason),
        # DRAM's health is a sentence where it is no word: why it cannot grow.
        ("dram", tiers.dram.health, ""),
        ("nvme", tiers.nvme.health, tiers.nvme.reason),
    ):
        if health not in _FINE[name]:
            what, why = ("not ok", health) if name == "dram" else (_words(health), reason)
            yield f"{name} {what}", why
    remote = status.remote
    if remote.state not in _FINE["remote"]:
        why = remote.reason or _REMOTE_ADVICE.get(remote.state, "")
        yield f"remote {_words(remote.state)}", why
    yield from _of_clears(remote)
    if status.service.ledger_health not in ("", "ok"):
        yield f"ledger {_words(status.service.ledger_health)}", status.service.ledger_reason
    if status.service.paths_reason:
        yield "files removed", status.service.paths_reason
    if status.core.index.bound:
        yield "index too small", "start with a larger --index-pages"


def _of_clears(remote: status_pb2.RemoteStatus) -> Iterator[tuple[str, str]]:
    if remote.epochs_owed:
        why = (
            f"{remote.epochs_owed:,} of this host's; no other host knows of them yet. Where the "
            "store answers, the fleet has cleared too many namespaces: clear --all makes room"
        )
        yield "remote clears owed", why
    is_old = not 0 <= remote.epochs_ago_s <= _EPOCHS_FRESH_S
    if remote.read == "on" and remote.state in ("serving", "full") and is_old:
        why = remote.reason if remote.state == "serving" else ""
        why = why or "the store does not say which namespaces the fleet has cleared"
        yield "remote not read", why


def _words(code: str) -> str:
    return code.replace("_", " ")

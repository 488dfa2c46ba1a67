"""What tests of a served daemon share."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwarehouse.daemon import lifecycle
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.watchdog import STALL_S, Watchdog
from testkit.tcp import OTHER, TOKEN, made_certificate


class Patience:
    """That of this process's daemons with clients that stand still: its clock stands too, until a
    test lets it end, so that no busy machine makes a client stand still."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._watchdogs: list[Watchdog] = []

    def watchdog(self, log: Log) -> Watchdog:
        self._watchdogs.append(Watchdog(log, clock=lambda: self._now_s))
        return self._watchdogs[-1]

    def end(self) -> None:
        """Whoever stands still now has done so for longer than a client may. Returns when the
        streams of those are ended."""
        self._now_s += 2 * STALL_S
        for each in self._watchdogs:
            each.look()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    patience = Patience()
    monkeypatch.setattr(lifecycle, "Watchdog", patience.watchdog)
    return patience


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate of localhost and 127.0.0.1, and its key."""
    return made_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"{OTHER}\n{TOKEN}\n")
    path.chmod(0o600)
    return str(path)

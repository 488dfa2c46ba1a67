"""What tests of a served daemon share."""

from __future__ import annotations

import pytest

from kvwarehouse.daemon import lifecycle
from kvwarehouse.daemon.watchdog import Watchdog


@pytest.fixture
def short_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that end a stream whose client stands still for 0.2 s."""
    monkeypatch.setattr(lifecycle, "Watchdog", lambda log: Watchdog(log, stall_s=0.2))

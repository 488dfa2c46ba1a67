"""The daemon's state: what follows it hears of changes in their order."""

from __future__ import annotations

import threading

from kvwarehouse.daemon.health import DaemonState, Lifecycle
from kvwarehouse_bench.harness.eventually import DEADLINE_S


def test_listener_hears_last_of_the_state_that_stays() -> None:
    """Incident: a Drain at the moment at which the daemon was ready left its health at serving."""
    lifecycle, heard = Lifecycle(), list[DaemonState]()
    drain = threading.Thread(target=lifecycle.advance, args=[DaemonState.DRAINING])

    def listener(state: DaemonState) -> None:
        if state is DaemonState.SERVING:
            drain.start()
            drain.join(0.2)  # as far as it gets meanwhile
        heard.append(state)

    lifecycle.listen(listener)
    assert lifecycle.advance(DaemonState.SERVING)
    drain.join(DEADLINE_S)
    assert lifecycle.state is heard[-1] is DaemonState.DRAINING

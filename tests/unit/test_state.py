"""The daemon's state: what follows it hears of changes in their order."""

from __future__ import annotations

import threading

from kvwarehouse.daemon.health import Lifecycle, State
from kvwarehouse_bench.harness.until import DEADLINE_S


def test_listener_hears_last_of_the_state_that_stays() -> None:
    """Incident: a Drain at the moment at which the daemon was ready left its health at serving."""
    lifecycle, heard = Lifecycle(), list[State]()
    drain = threading.Thread(target=lifecycle.advance, args=[State.DRAINING])

    def listener(state: State) -> None:
        if state is State.SERVING:
            drain.start()
            drain.join(0.2)  # as far as it gets meanwhile
        heard.append(state)

    lifecycle.listen(listener)
    assert lifecycle.advance(State.SERVING)
    drain.join(DEADLINE_S)
    assert lifecycle.state is heard[-1] is State.DRAINING

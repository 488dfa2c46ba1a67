"""A real `kvwarehouse serve` against a dictionary: random stores, loads, evictions, clears, pins,
clients, failing disks, flipped bits and ends of the daemon.

Every load is the dictionary's bytes or a miss; a lookup never promises more than was stored; what
was stored is there or counted as left; what was cleared never comes back, over restarts and over
the loss of the arena; hits and misses are the pages asked for; what a daemon finds damaged is what
was damaged here.

The rules are in tests/support/testkit/machine. KVW_TEST_EXAMPLES and KVW_TEST_STEPS make it longer
(and shrink what fails): add `-o faulthandler_timeout=0`, which would end a test of over three
minutes.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

from testkit import tally
from testkit.machine.ends import Ends
from testkit.machine.faults import Faults
from testkit.machine.leaving import Leaving

# Each starts and ends daemons some ten times, so that a run of all tests has few of them.
EXAMPLES = int(
    os.environ.get("KVW_TEST_EXAMPLES", str(2 if tally.rounds(1) == 1 else tally.rounds(4)))
)
STEPS = int(os.environ.get("KVW_TEST_STEPS", "50"))
LONG = "KVW_TEST_EXAMPLES" in os.environ

pytestmark = pytest.mark.timeout(1800 if LONG else tally.rounds(600))


class WarehouseMachine(Leaving, Ends, Faults):
    pass


TestAgainstDictionary = WarehouseMachine.TestCase
TestAgainstDictionary.settings = hypothesis.settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    # Shrinking restarts daemons for minutes: only where time was given.
    phases=[
        phase
        for phase in hypothesis.Phase
        if LONG or phase not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)
    ],
)

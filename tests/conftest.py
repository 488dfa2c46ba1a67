"""What all tests share: one seed a run, printed at its top and again settable as KVW_SEED; and
turns, for tests that must run alone where pytest-xdist runs them in several processes."""

import contextlib
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from kvwarehouse.testing.turns import Turns

# Exported, so that the other processes of the run use it too, and daemons and native programs that
# tests start.
SEED = int(os.environ.setdefault("KVW_SEED", str(secrets.randbits(32))), 0)

# Other work on the machine must not fail a test: no deadline, no complaint about slow data. The
# example database is off because a run is repeated by its seed.
hypothesis.settings.register_profile(
    "kvwarehouse",
    deadline=None,
    derandomize=False,
    print_blob=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvwarehouse")

_TURNS = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist: before it starts one of its processes."""
    config: pytest.Config = node.config
    if _TURNS not in config.stash:
        folder = Path(tempfile.mkdtemp(prefix="kvw-turns-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.stash[_TURNS] = folder
    node.workerinput["turns"] = str(config.stash[_TURNS])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Outermost, so that waiting counts for no time limit.
    with _turn(item):
        return (yield)


def _turn(item: pytest.Item) -> contextlib.AbstractContextManager[None]:
    given = getattr(item.config, "workerinput", None)
    if given is None:  # one process
        return contextlib.nullcontext()
    turns = Turns(Path(given["turns"]))
    return turns.alone() if item.get_closest_marker("alone") else turns.shared()


def pytest_report_header() -> str:
    return f"seed: KVW_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"repeat this run with KVW_SEED={SEED}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the run's seed and the test's name, on no other test."""
    return random.Random(f"{SEED}:{request.node.nodeid}").getrandbits(63)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)

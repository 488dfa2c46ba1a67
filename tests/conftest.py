"""What all tests share: one seed a run, printed at its top and again settable as KVW_SEED."""

import os
import random
import secrets

import hypothesis
import pytest

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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


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

"""What all tests share: one seed a run, printed at its top and again settable as KVW_SEED; the
command that repeats a failure; and the contract model of CUDA's driver."""

import gc
import os
import random
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from kvwarehouse_bench.harness.eventually import eventually
from testkit import cuda_model, own_environment, repeating, tally
from testkit.cuda_model import ModelDevice

# Exported, so that the other processes of the run use it too, and daemons and native programs that
# tests start.
SEED = int(os.environ.setdefault("KVW_SEED", str(secrets.randbits(32))), 0)

own_environment.take()

# numpy starts a thread for each core, which spins: in hundreds of processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What tests share is there for the processes that they start, too.
_SUPPORT = str(Path(__file__).with_name("support"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Other work on the machine must not fail a test: no deadline, no complaint about slow data. The
# example database is off because a run is repeated by its seed.
hypothesis.settings.register_profile(
    "kvwarehouse",
    deadline=None,
    derandomize=False,
    print_blob=True,
    database=None,
    max_examples=tally.rounds(100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvwarehouse")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-only",
        action="store_true",
        help="Run only what draws numbers: properties, and tests with a seed of their own.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("random_only"):
        drawn = [item for item in items if _draws(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
        items[:] = drawn


def _draws(item: pytest.Item) -> bool:
    fixtures = {"seed", "rng"} & set(getattr(item, "fixturenames", ()))
    return bool(fixtures) or hypothesis.is_hypothesis_test(getattr(item, "obj", None))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    _pass_no_ignored_signals_on()
    config.option.ignore = repeating.looked_into(config.option.ignore or (), config.args)


def _pass_no_ignored_signals_on() -> None:
    """What a shell starts in the background ignores SIGINT, and under nohup SIGHUP, and so would
    all that tests start. A handler that does nothing is not passed on."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, lambda *_: None)


def pytest_report_header() -> str:
    return f"seed: KVW_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    failed = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]
    if failed:
        terminalreporter.write_line("repeat what failed:")
    for command in repeating.commands(failed, SEED, os.environ):
        terminalreporter.write_line(f"    {command}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the run's seed and the test's name, on no other test."""
    return random.Random(f"{SEED}:{request.node.nodeid}").getrandbits(63)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def listed_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of a remote store's listing fails is tried again at once."""
    monkeypatch.setattr("kvwarehouse.remote.walk.FIRST_PAUSE_S", 0)


@pytest.fixture(scope="session")
def built_cuda_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One build for the run: a process chooses its driver once, so two would be two devices, and
    the memory of one no memory of the other."""
    return cuda_model.build(tmp_path_factory.mktemp("cuda_model"))


@pytest.fixture(scope="module")
def cuda_driver(built_cuda_model: Path) -> Iterator[Path]:
    """The model in the driver's place, for this process and those that it starts: its folder. No
    other file's daemons see it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda_model.environment(built_cuda_model).items():
            patch.setenv(name, value)
        yield built_cuda_model


@pytest.fixture(scope="module")
def device(cuda_driver: Path) -> ModelDevice:
    """The model's device 0."""
    return ModelDevice(cuda_driver)


@pytest.fixture
def contract_kept(device: ModelDevice) -> Iterator[None]:
    """Whatever a test does to the device ends with it, and the driver's contract was kept."""
    yield
    for name in ("hold", "lost"):
        device.set(name, 0)
    # A path that a test closed frees its stages behind its back: the next one counts what is held.
    eventually(lambda: "kvw-path" not in (each.name for each in threading.enumerate()), "paths end")
    gc.collect()
    assert device.count("violations") == 0

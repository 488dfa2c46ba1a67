"""Real parts of SGLang, in this process, on a real daemon. What is not here: a GPU, and with it the
model, the scheduler and SGLang's copies between device and host pools (docs/sglang.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang_rig.absent  # noqa: F401 - before anything of SGLang

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang installs it")
# Ranks of a test talk to each other on this machine alone.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# SGLang compiles its page hash when it is first used: beside the environment, not in a home.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))

from sglang.srt.plugins import load_plugins

from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core import daemon_connection
from sglang_rig.engine import PATIENCE, Engine, Rank, config, join_ranks
from sglang_rig.pools import Shape

_TEST_S = 300
_ROOM = {"dram": "64MiB", "nvme_capacity": "128MiB", "nvme_segment": "8MiB"}
_STALLED_S = daemon_connection._STALLED_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a new installation also compiles SGLang's native hash."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_TEST_S))


@pytest.fixture(scope="session", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_plugins()  # as SGLang's scheduler process begins
    join_ranks(Rank(tmp_path_factory.mktemp("ranks") / "one"))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, bound in PATIENCE:
        monkeypatch.setattr(module, bound, DEADLINE_S)


@pytest.fixture
def end_is_seen(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that end or stop their daemon: the connector takes its silence for that as soon as
    it does in an engine."""
    monkeypatch.setattr(daemon_connection, "_STALLED_S", _STALLED_S)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("disk"), **_ROOM) as serving:
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """For tests that do things to it."""
    with Serving(tmp_path, **_ROOM) as serving:
        yield serving


Start = Callable[..., Engine]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """start(address, shape, model=..., **extra): an attached engine, with a salt of the test's own
    unless extra has one."""
    engines: list[Engine] = []

    def started(
        address: str, shape: Shape | None = None, model: str = "tiny", **extra: Any
    ) -> Engine:
        chosen = config(address, **{"kvwarehouse.salt": request.node.nodeid[:200], **extra})
        engine = Engine(shape or Shape(), chosen, model)
        engine.attach()
        engines.append(engine)
        return engine

    yield started
    for engine in engines:
        engine.controller.detach_storage_backend()

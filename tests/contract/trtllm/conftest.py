"""A real daemon for each test, and engines of the contract model on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_model import interface

# Before anything imports the connector: there is no TensorRT-LLM here, or it is not what is tested.
interface.install("new")

from kvwarehouse_bench.harness.serving import Serving  # noqa: E402
from kvwarehouse_connectors.core import daemon_connection  # noqa: E402
from trtllm_model.ranks import PATIENT_S, Engine, Spec  # noqa: E402

Start = Callable[..., Engine]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """With a failure comes what the engines' connectors know of themselves."""
    report = yield
    start = getattr(item, "funcargs", {}).get("start")
    if report.failed and call.when == "call":
        for number, engine in enumerate(getattr(start, "engines", ())):
            report.sections.append((f"engine {number}", engine.told()))
    return report


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """For tests that neither end nor empty it: prompts are their own."""
    with Serving(tmp_path_factory.mktemp("shared"), dram="256MiB") as serving:
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="64MiB", nvme_capacity="512MiB") as serving:
        yield serving


@pytest.fixture
def dram(tmp_path: Path) -> Iterator[Serving]:
    """One without NVMe."""
    with Serving(tmp_path, dram="64MiB") as serving:
        yield serving


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """weights: the model's are dummies. A lookup has all the time that it needs, and a daemon whose
    heartbeat is late is not taken for one that stands still, so that a slow machine changes no
    result; what tests those bounds sets them itself."""
    monkeypatch.setattr(daemon_connection, "_STALLED_S", PATIENT_S)
    monkeypatch.setenv("TLLM_KVW_WEIGHTS", "model-1")
    monkeypatch.setenv("TLLM_KVW_LOOKUP_BUDGET_S", "10")
    monkeypatch.setenv("TLLM_KVW_STAGING_BYTES", "4MiB")
    return monkeypatch


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """start(spec, **changes of it): an engine, ended with the test. On the test's own daemon where
    it has one."""
    own = [name for name in ("serving", "dram") if name in request.fixturenames]
    daemon: Serving = request.getfixturevalue(own[0] if own else "shared")
    engines: list[Engine] = []

    def start(spec: Spec | None = None, **changes: Any) -> Engine:
        made = replace(spec or Spec(), **changes)
        engines.append(Engine(made, daemon.address))
        return engines[-1]

    start.engines = engines  # type: ignore[attr-defined]  # of a function, for its report
    yield start
    for engine in reversed(engines):
        engine.__exit__(None, None, None)


@pytest.fixture
def prompt(rng: random.Random) -> Callable[[int], list[int]]:
    return lambda tokens: [rng.randrange(50_000) for _ in range(tokens)]

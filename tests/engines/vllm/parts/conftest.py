"""Both halves of the connector over a real daemon, with the test in the place of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core import daemon_connection, self_test
from kvwarehouse_connectors.vllm import adapters, scheduler
from kvwarehouse_connectors.vllm_tier import tier_core
from vllm_parts.halves import Engine
from vllm_parts.prompts import one_group

_STALLED_S = daemon_connection._STALLED_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the machine is so busy that the thread that reads adapters comes late, or that the
    daemon gets no turn for seconds."""
    monkeypatch.setattr(adapters, "_PATIENCE_S", DEADLINE_S)
    monkeypatch.setattr(adapters, "_FRESH_S", DEADLINE_S)
    monkeypatch.setattr(self_test, "_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(scheduler, "_START_WAIT_S", DEADLINE_S)
    monkeypatch.setattr(tier_core, "_START_WAIT_S", DEADLINE_S)
    monkeypatch.setattr(daemon_connection, "_CALL_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(daemon_connection, "_STALLED_S", DEADLINE_S)


@pytest.fixture
def end_is_seen(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that end their daemon: the connector takes its silence for that as soon as it does
    in an engine."""
    monkeypatch.setattr(daemon_connection, "_STALLED_S", _STALLED_S)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("disk"), dram="64MiB") as serving:
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """For tests that do things to it."""
    with Serving(tmp_path, dram="64MiB") as serving:
        yield serving


@pytest.fixture
def engine(shared: Serving) -> Iterator[Engine]:
    with Engine(shared.address, one_group) as engine:
        yield engine

"""The checkpoints, daemon and engines that the tests of the vLLM connector share. An engine takes
half a minute to start, so the tests of a file share one, and of most files the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw
from vllm_rig.bay import Bay
from vllm_rig.checkpoints import Checkpoints
from vllm_rig.daemon import Daemon
from vllm_rig.engine import Engine
from vllm_rig.options import engine_options, transfer_config
from vllm_rig.pair import Pair
from vllm_rig.server import Server
from vllm_rig.stored_pages import StoredPages

_TEST_S = 600
_LOG_CHARACTERS = 12_000
_ROOM = {"dram": "256MiB", "nvme_capacity": "512MiB", "nvme_segment": "16MiB", "grace_s": "0.1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share an engine follow each other, and have time for it to start."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    items[:] = [item for item in items if item not in ours] + sorted(ours, key=_turn)
    for item in ours:
        item.add_marker(pytest.mark.timeout(_TEST_S))


def _turn(item: pytest.Item) -> int:
    """First the engine of most tests, then the tests that begin with it and end with plain vLLM."""
    used = getattr(item, "fixturenames", ())
    turns = ("pair" in used, item.path.name == "test_restarts.py", "plain" in used, True)
    return turns.index(True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """With a failure comes what the daemon counts, and what it and the engine have said: the
    longest last, where a log of many tests may be cut."""
    report = yield
    if not report.failed:
        return report
    used = getattr(item, "funcargs", {})
    if (stored_pages := used.get("stored_pages")) is not None:
        report.sections.append(("the daemon's status", stored_pages.described()))
    if (daemon := used.get("daemon")) is not None:
        report.sections.append(("the daemon's log", _log_of(daemon)))
    if (bay := used.get("bay")) is not None and bay.log():
        report.sections.append(("the engine's log", bay.log()))
    return report


def _log_of(daemon: Daemon | kvw.PrivateDaemon) -> str:
    """The end of it. Some files have a private daemon in the place of the engines' one."""
    if isinstance(daemon, Daemon):
        return daemon.tail()
    log = daemon.log_path  # gone with the daemon, where it is the fixture's end that failed
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return text[-_LOG_CHARACTERS:]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def checkpoint(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama of most tests, in a place where other weights may take its place."""
    return checkpoints.copy(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def bay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bay]:
    bay = Bay(tmp_path_factory.mktemp("engines"))
    yield bay
    bay.empty()


Swap = Callable[[Engine, int], None]


@pytest.fixture
def swap(checkpoints: Checkpoints, checkpoint: Path, bay: Bay) -> Iterator[Swap]:
    """swap(engine, seed): other files at the same path, and the engine reloads them in place."""

    def swapped(engine: Engine, seed: int) -> None:
        checkpoints.copy(checkpoint, seed=seed)
        engine.probe("reload_weights")

    yield swapped
    checkpoints.copy(checkpoint)
    bay.empty()


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("disk"), **_ROOM) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def stored_pages(shared_daemon: Daemon) -> Iterator[StoredPages]:
    with StoredPages(shared_daemon) as stored_pages:
        yield stored_pages


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The daemon, running; whatever a test does to it, the next one finds it so again."""
    yield shared_daemon
    shared_daemon.revive()


@pytest.fixture
def plain(bay: Bay, checkpoint: Path) -> Engine:
    """vLLM as it is, without a connector."""
    engine: Engine = bay.get(Engine, engine_options(checkpoint))
    engine.forget()
    return engine


Start = Callable[..., Pair]


@pytest.fixture
def start(bay: Bay, daemon: Daemon, stored_pages: StoredPages, checkpoint: Path) -> Start:
    """start(settings={...}, **options): an engine on the daemon, the running one if it is the same.
    settings: the connector's; options: vLLM's."""

    def started(settings: dict[str, Any] | None = None, **options: Any) -> Pair:
        transfer = transfer_config(daemon.address, **(settings or {}))
        chosen = engine_options(checkpoint, kv_transfer_config=transfer, **options)
        return Pair(bay.get(Engine, chosen), daemon, stored_pages)

    return started


@pytest.fixture
def pair(start: Start, rng: random.Random) -> Pair:
    """The engine of most tests, connected, with nothing in vLLM's own cache."""
    pair = start()
    pair.connected(rng)
    pair.engine.forget()
    return pair


@pytest.fixture
def server(bay: Bay, daemon: Daemon, checkpoint: Path) -> Server:
    """`vllm serve` with the connector, with nothing in vLLM's own cache."""
    transfer = transfer_config(daemon.address)
    server: Server = bay.get(Server, engine_options(checkpoint, kv_transfer_config=transfer))
    server.forget()
    return server

"""Two daemons of different identities for backups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwarehouse.backup import exporting, importing
from kvwarehouse_bench.harness.serving import Serving
from testkit.backups import PAGE_BYTES


@pytest.fixture(scope="module")
def two_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Serving]]:
    with (
        Serving(tmp_path_factory.mktemp("source"), dram="32MiB", nvme_capacity="32MiB") as source,
        Serving(tmp_path_factory.mktemp("target"), dram="32MiB") as target,
    ):
        yield source, target


def emptied(serving: Serving) -> Serving:
    """As if it were new, however the test before left it."""
    with serving.connect() as client:
        client.undrain()
        client.clear(all=True, forget=True)
        assert not client.namespaces()
    return serving


@pytest.fixture
def source(two_daemons: tuple[Serving, Serving]) -> Serving:
    return emptied(two_daemons[0])


@pytest.fixture
def target(two_daemons: tuple[Serving, Serving]) -> Serving:
    return emptied(two_daemons[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "backup.kvw"


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two pages, so that there is a middle."""
    for module in (exporting, importing):
        monkeypatch.setattr(module, "WINDOW_BYTES", 2 * PAGE_BYTES)

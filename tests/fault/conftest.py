"""Daemons of a test's own whose files are damaged, and their count; a disk that fails on demand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwarehouse_bench.harness.serving import Serving
from testkit import tally
from testkit.faulty_disk import FaultyDisk


def serving_both(disk: Path) -> Serving:
    return Serving(disk, dram="8MiB", nvme_capacity="32MiB", nvme_segment="2MiB", grace_s="0.1")


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test that holds is a fault against a live daemon."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed == failed:
        tally.count("stored bytes, files or ledger damaged, with a live daemon")


@pytest.fixture
def dram_only(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="8MiB", grace_s="0.1") as serving:
        yield serving


@pytest.fixture
def both_tiers(tmp_path: Path) -> Iterator[Serving]:
    with serving_both(tmp_path) as serving:
        yield serving


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyDisk:
    """The disk of a daemon's NVMe tier that is in `tmp_path`, with its environment."""
    try:
        return FaultyDisk(tmp_path, tmp_path / "nvme" / "segments")
    except FileNotFoundError as error:
        pytest.skip(f"cannot make disks fail here: {error}")


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Serving]:
    """As both_tiers: another warehouse."""
    with serving_both(tmp_path / "another") as serving:
        yield serving

"""A second daemon on directories that are in use, by whatever path it comes to them: it is refused
with the pid of the first, which goes on untouched."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit import tally

pytestmark = pytest.mark.timeout(240)

LONG = tally.rounds(1) > 1
# The plain path is test_bad_input.py's too.
WAYS = ["path", "dots", "link", "parent-link", "bind"] if LONG else ["link", "bind"]

PAGE_BYTES = 4096
NODES = list(range(8))
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
SIZES = {"dram": "8MiB", "nvme_capacity": "8MiB", "nvme_segment": "1MiB"}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("first"), **SIZES) as serving:
        with serving.connect() as client:
            pages = pages_of(NODES, 0, 0, PAGE_BYTES)
            result = client.open(SPACE).store(NODES, pages, timeout_s=60)
            assert result.stored == len(NODES)
            assert client.flush().pending == 0
        yield serving


def check_untouched(first: Serving) -> None:
    with first.connect(timeout_s=60) as client:
        out = np.zeros((len(NODES), PAGE_BYTES), np.uint8)
        assert client.open(SPACE).load(NODES, out, timeout_s=60) == len(NODES)
        check_pages(out, NODES, 0, 0)
        core = client.status()["core"]
        assert core["tiers"]["nvme"]["pages"] == len(NODES)
        assert core["tiers"]["nvme"]["health"] == "ok"
    assert first.metrics()["kvwarehouse_quarantined_pages_total"] == 0


@contextmanager
def way(kind: str, to: Path, scratch: Path) -> Iterator[Path]:
    """Another path to the same directory."""
    if kind == "path":
        yield to
    elif kind == "dots":
        yield to / ".." / to.name
    elif kind == "link":
        (scratch / "link").symlink_to(to)
        yield scratch / "link"
    elif kind == "parent-link":
        (scratch / "parent").symlink_to(to.parent)
        yield scratch / "parent" / to.name
    else:
        bound = scratch / "bound"
        bound.mkdir(mode=0o700)
        mounted = subprocess.run(
            ["mount", "--bind", str(to), str(bound)], capture_output=True, text=True, check=False
        )
        if mounted.returncode != 0:
            pytest.skip(f"no bind mounts here: {mounted.stderr.strip()}")
        try:
            yield bound
        finally:
            subprocess.run(["umount", str(bound)], check=True)


@pytest.mark.parametrize("folder", ["arena_dir", "nvme_dir"])
@pytest.mark.parametrize("kind", WAYS)
def test_second_daemon_is_refused_by_whatever_path_it_comes(
    first: Serving, tmp_path: Path, kind: str, folder: str
) -> None:
    before = os.stat(getattr(first, folder)).st_ino
    with way(kind, getattr(first, folder), tmp_path) as path:
        second = Serving(tmp_path / "second", **SIZES)
        second.settings[folder] = str(path)
        try:
            with pytest.raises(RefusedError) as refused:
                second.start()
            assert f"pid {first.pid}" in refused.value.text
            # Its own other directory is no obstacle afterwards.
            del second.settings[folder]
            if folder == "arena_dir":
                second.settings["arena_dir"] = str(second.folder / "own")
            else:
                second.settings["nvme_dir"] = str(tmp_path / "own")
            if kind == "path":
                second.start()
        finally:
            second.remove()
    assert os.stat(getattr(first, folder)).st_ino == before
    check_untouched(first)
    tally.count("second daemon started on directories in use")


def test_daemon_that_is_stopped_still_owns_its_directories(first: Serving, tmp_path: Path) -> None:
    """A stalled owner is an owner: it will write when it goes on."""
    for _ in range(tally.rounds(1)):
        first.pause()
        try:
            second = Serving(tmp_path / "second", arena_dir=str(first.arena_dir), **SIZES)
            with pytest.raises(RefusedError) as refused:
                second.start()
            second.remove()
            assert f"pid {first.pid}" in refused.value.text
        finally:
            first.resume()
        check_untouched(first)
        tally.count("second daemon started on directories in use")

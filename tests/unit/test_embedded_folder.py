"""Temporary directories of private daemons: none is left behind, none is taken from its owner."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvwarehouse.embedded import folder as folders
from kvwarehouse.embedded.folder import PrivateFolder, hold, sweep


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the system's temporary directory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(disk))
    return disk


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of tmpfs."""
    base = tmp_path / "shm"
    base.mkdir()
    monkeypatch.setattr(folders, "_SHARED_MEMORY", str(base))
    return base


def test_folder_is_its_owners_alone_and_gone_after_removal(base: Path) -> None:
    folder = PrivateFolder(1 << 20)
    assert folder.path.parent == base
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert list(base.iterdir()) == []


def test_folder_in_use_survives_a_sweep(base: Path) -> None:
    folder = PrivateFolder(1 << 20)
    sweep(base)
    other = PrivateFolder(1 << 20)
    assert folder.path.exists()
    folder.remove()
    other.remove()


def test_folder_that_only_the_daemon_still_holds_survives_a_sweep(base: Path) -> None:
    folder = PrivateFolder(1 << 20)
    daemons = hold(folder.lock_path)
    os.close(folder._lock)
    folder._lock = -1
    sweep(base)
    assert folder.path.exists()
    os.close(daemons)
    sweep(base)
    assert not folder.path.exists()


def test_folder_of_a_killed_owner_is_swept_by_the_next(base: Path) -> None:
    left = PrivateFolder(1 << 20)
    (left.path / "arena").mkdir()
    (left.path / "arena" / "slab").write_bytes(b"x" * 100)
    os.close(left._lock)
    left._lock = -1
    folder = PrivateFolder(1 << 20)
    assert list(base.iterdir()) == [folder.path]
    folder.remove()


def test_arena_of_a_killed_owner_makes_room_for_the_next_when_it_fills_tmpfs(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the next owner found no room in tmpfs, went to the disk and swept that alone, as
    all after it did."""
    left = PrivateFolder(1 << 20)
    os.close(left._lock)
    left._lock = -1

    def usage(path: str) -> SimpleNamespace:
        assert path == str(base)
        return SimpleNamespace(free=0 if left.path.exists() else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    folder = PrivateFolder(1 << 20)
    assert list(base.iterdir()) == [folder.path]
    folder.remove()


def test_folder_of_a_killed_owner_is_swept_on_disk_when_the_next_is_in_tmpfs(disk: Path) -> None:
    left = PrivateFolder(1 << 60)
    assert left.path.parent == disk
    os.close(left._lock)
    left._lock = -1
    folder = PrivateFolder(1 << 20)
    assert list(disk.iterdir()) == []
    folder.remove()


def test_folder_is_on_disk_when_tmpfs_has_no_room(disk: Path) -> None:
    """Containers commonly have 64 MiB of /dev/shm."""
    folder = PrivateFolder(1 << 60)
    assert folder.path.parent == disk
    folder.remove()

"""Whose hands a path is in: every folder and link on the way, and no more than those."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvwarehouse.trusted_path import WeakPoint, problem, weak_point
from testkit.mounts import mount_tmpfs, own_mounts

US = {os.geteuid(), 0}
STRANGER = 1001

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A file some folders down, all of them ours alone."""
    path = tmp_path / "a" / "b" / "c"
    path.parent.mkdir(parents=True, mode=0o700)
    path.touch(0o600)
    return path


def test_path_below_folders_of_ours_and_roots_is_out_of_reach(deep: Path) -> None:
    assert weak_point(str(deep), US) is None
    assert weak_point(str(deep / "not" / "there"), US) is None
    assert problem(str(deep)) == ""
    assert problem("/dev/shm/kvw-test-not/there") == ""
    assert problem("/") == ""


def test_relative_path_is_looked_at_from_where_the_process_is(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(deep.parent)
    deep.parent.parent.chmod(0o777)
    weak = weak_point("./../b/c", US)
    assert weak is not None
    assert weak.path == str(deep.parent.parent)


@as_root
def test_folder_that_everybody_could_write_to_and_nobody_can_is_out_of_reach(
    tmp_path: Path,
) -> None:
    """A ConfigMap's."""
    with own_mounts():
        volume = tmp_path / "volume"
        mount_tmpfs(volume, "1m")
        volume.chmod(0o777)
        (volume / "kvwarehouse.toml").touch()
        assert weak_point(str(volume / "kvwarehouse.toml"), US) is not None
        subprocess.run(["mount", "-o", "remount,ro", str(volume)], check=True)
        assert weak_point(str(volume / "kvwarehouse.toml"), US) is None


@pytest.mark.parametrize("up", [0, 1])
def test_folder_that_everybody_writes_to_is_a_weak_point_unless_it_is_sticky(
    deep: Path, up: int
) -> None:
    folder = deep.parents[up]
    folder.chmod(0o777)
    said = "has mode 0777, so others can write to it"
    assert weak_point(str(deep), US) == WeakPoint(str(folder), None, said)
    assert f"chmod o-w {folder}" in problem(str(deep))
    folder.chmod(0o1777)
    assert weak_point(str(deep), US) is None


def test_group_is_the_owners_choice_but_in_the_folder_of_a_socket(deep: Path) -> None:
    """As a pod's volume with an fsGroup: root's, and writable by the group of the daemon."""
    deep.parents[1].chmod(0o2775)
    assert weak_point(str(deep), US, group=True) is None
    deep.parent.chmod(0o2775)
    assert weak_point(str(deep), US) is None
    assert weak_point(str(deep), US, group=True) is not None
    assert f"chmod go-w {deep.parent}" in problem(str(deep), group=True)


@as_root
@pytest.mark.parametrize("up", [0, 1, 2])
def test_what_belongs_to_a_stranger_is_a_weak_point(deep: Path, up: int) -> None:
    each = [deep, *deep.parents][up]
    os.chown(each, STRANGER, -1)
    said = "belongs to uid 1001"
    assert weak_point(str(deep), US) == WeakPoint(str(each), STRANGER, said)
    assert weak_point(str(deep), US | {STRANGER}) is None
    assert "run as uid 1001" in problem(str(deep))


@as_root
def test_link_on_the_way_is_a_weak_point_where_a_stranger_can_turn_it(
    deep: Path, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    (theirs / "turned").symlink_to(deep.parent)
    ours.symlink_to("theirs/../theirs/turned")
    assert weak_point(str(ours / "c"), US) is None
    os.chown(theirs, STRANGER, -1)
    weak = weak_point(str(ours / "c"), US)
    assert weak is not None
    assert weak.path == str(theirs)
    os.chown(theirs, 0, -1)
    os.chown(theirs / "turned", STRANGER, -1, follow_symlinks=False)
    weak = weak_point(str(ours / "c"), US)
    assert weak is not None
    assert weak.path == str(theirs / "turned")


def test_links_in_a_circle_are_no_endless_way(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        weak_point(str(tmp_path / "a"), US)


# Root of the machine, and of all folders, is outside of the namespace, where 1001 alone is known.
IN_A_NAMESPACE = """
import ctypes, os, sys
from testkit.mounts import mount_tmpfs, own_mounts
from kvwarehouse.trusted_path import problem
inside, mapped = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    if ctypes.CDLL(None).unshare(0x10000000) != 0:  # CLONE_NEWUSER
        os._exit(77)
    os.write(inside[1], b"x")
    os.read(mapped[0], 1)
    os.setuid(1001)
    print(os.stat("/dev/shm").st_uid, *map(problem, sys.argv[1:]), sep="\\n", flush=True)
    os._exit(0)
os.close(inside[1])
if os.read(inside[0], 1):
    with open(f"/proc/{child}/uid_map", "w") as file:
        file.write("1001 1001 1")
    os.write(mapped[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@as_root
def test_roots_folders_are_trusted_where_a_namespace_shows_them_as_nobodys() -> None:
    """As a rootless container: /tmp and /dev/shm are the host's. What lies in them may be anybody's
    of the host, and is shown as the same nobody's."""
    with tempfile.TemporaryDirectory(prefix="kvw-test-", dir="/dev/shm") as theirs:
        command = [sys.executable, "-c", IN_A_NAMESPACE, "/dev/shm/new", f"{theirs}/new"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode == 77:
        pytest.skip("this machine permits no user namespaces")
    assert ran.returncode == 0, ran.stderr
    nobody, shared, below = ran.stdout.splitlines()
    assert nobody != "0"
    assert shared == ""
    assert f"{theirs} belongs to uid {nobody}" in below

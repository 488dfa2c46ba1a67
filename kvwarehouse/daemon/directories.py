"""The daemon's directories: made private, refused when others could write to them or replace them,
owned by one daemon at a time, and checked for room before anything is created in them; and
whether the disk of the NVMe tier answers at all, before the start waits for it without a bound.

Used once, at the start, by one thread. A read that hangs cannot be given up: it keeps its thread,
which is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import mmap
import os
import shlex
import stat
from functools import partial
from pathlib import Path
from typing import Final

from kvwarehouse import trusted_path
from kvwarehouse.config import Config
from kvwarehouse.daemon.disk_calls import DiskCalls, LateDiskError
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.errors import StorageError
from kvwarehouse.host import filesystems, memory
from kvwarehouse.sizes import format_size

_LOCK_NAME: Final = "daemon.lock"

_BLOCK_BYTES: Final = 4096
_FILES_READ: Final = 16  # identity, ledger and the like, of a directory that may have others


def prepare(path: str, flag: str) -> None:
    """Makes `path` (0700, with its parents) or checks that it is a directory of ours that others
    can neither write to nor replace. Raises StorageError that names `flag`, the path, what is wrong
    on the way to it, and the fix."""
    try:
        _refuse(path, flag, trusted_path.problem(os.path.dirname(path)))
        _make(Path(path))
        _refuse(path, flag, _problem(path, os.stat(path), os.lstat(path)))
        _refuse(path, flag, trusted_path.problem(path))
    except PermissionError as error:
        _refuse(
            path,
            flag,
            f"cannot be made or opened: {error.strerror}; as root: install -d -m 0700 "
            f"-o {os.geteuid()} {shlex.quote(path)}, or name a directory of your own",
        )
    except OSError as error:
        _refuse(path, flag, f"cannot be made or opened: {error.strerror}")


def _make(folder: Path) -> None:
    """os.makedirs gives its mode to the last one alone."""
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(0o700, exist_ok=True)


def prepare_for_socket(socket: str) -> None:
    """As `prepare`, for the directory of --socket: it may also be the system's, or one where others
    can make files of their own but not replace ours (sticky, as /tmp)."""
    folder = os.path.dirname(socket)
    if not os.path.isdir(folder):
        prepare(folder, "--socket directory")
    try:
        _refuse(socket, "--socket", trusted_path.problem(socket, group=True))
    except OSError as error:
        _refuse(socket, "--socket", f"cannot be looked at: {error.strerror}")


def _refuse(path: str, flag: str, problem: str) -> None:
    if problem:
        raise StorageError(
            f"{flag} {path!r} {problem}", code="bad_directory", context={"path": path}
        )


def _problem(path: str, facts: os.stat_result, link: os.stat_result) -> str:
    if not stat.S_ISDIR(facts.st_mode):
        return "is not a directory; name another, or move it away"
    for entry in (link, facts):
        if entry.st_uid != os.geteuid():
            return _foreign(entry.st_uid)
    return _writable(path, facts) if facts.st_mode & 0o022 else ""


def _foreign(owner: int) -> str:
    return (
        f"belongs to uid {owner}, and this daemon runs as uid {os.geteuid()}; name a directory of "
        "its own: whoever owns it could read and change what is in it"
    )


def _writable(path: str, facts: os.stat_result) -> str:
    mode = stat.S_IMODE(facts.st_mode)
    return f"has mode {mode:04o}, so others can write to it; run: chmod 700 {path}"


def lock_path(directory: str) -> str:
    """The file that an Ownership of `directory` locks."""
    return os.path.join(directory, _LOCK_NAME)


class Ownership:
    """A locked file that makes this process the one daemon of a directory, until close() or its
    death. The kernel's lock decides; the pid in the file is for the error's text."""

    def __init__(self, path: str) -> None:
        """Raises StorageError: code "owned", with the owner's pid, when another daemon has it,
        "bad_directory" when it is another user's, whose daemon may be none and is not believed."""
        self._fd = _open_private(path)
        try:
            _refuse_foreign_lock(path, os.fstat(self._fd))
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except StorageError:
            os.close(self._fd)
            raise
        except OSError as error:
            text = os.pread(self._fd, 32, 0).strip()
            owner = text.decode() if text.isdigit() else "unknown"
            os.close(self._fd)
            raise StorageError(
                f"{_owned_by(path)} is in use by another daemon, pid {owner}; stop that one "
                f"(kill {owner}), or give this one directories, a --name and --http of its own",
                code="owned",
                context={"path": path, "pid": owner},
            ) from error
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError:
            pass  # a full disk: the lock holds, only the pid is not told

    def close(self) -> None:
        """The file stays: removing it would let two daemons lock two files of one name."""
        os.close(self._fd)


def _owned_by(lock: str) -> str:
    """What the lock is of: its directory, or the socket beside it."""
    folder, name = os.path.split(lock)
    return folder if name == _LOCK_NAME else lock.removesuffix(".lock")


def _refuse_foreign_lock(path: str, facts: os.stat_result) -> None:
    folder = os.stat(os.path.dirname(path))
    # Its owner has all that is in it in hand, as where root looks at a user's. But where everybody
    # can make files: in a user namespace all who are not of it look like one, the owner of /tmp.
    owners = facts.st_uid == folder.st_uid and not folder.st_mode & stat.S_IWOTH
    if owners or facts.st_uid in (0, os.geteuid()):
        return
    raise StorageError(
        f"{path} belongs to uid {facts.st_uid} and is no lock of ours: who made it keeps the place "
        f"of {_owned_by(path)}; remove it, as root or uid {facts.st_uid}, or name another place",
        code="bad_directory",
        context={"path": path},
    )


def _open_private(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENOSPC) and os.path.exists(path):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):
            _refuse_foreign_lock(path, os.lstat(path))
        raise StorageError(
            f"{path} cannot be made or opened: {error.strerror}",
            code="bad_directory",
            context={"path": path},
        ) from error


def check_room(config: Config, index_bytes: int, table_bytes: int, log: Log) -> None:
    """Refuses what can not fit; says what may not. index_bytes: of the index beside the arena.
    table_bytes: of the core's own memory for what the index names."""
    _check_dram_room(config, index_bytes, log)
    if _is_tmpfs(config.arena_dir):
        _check_memory(config, index_bytes + table_bytes + memory.DAEMON_BYTES)
    else:
        log.event(
            Event.ARENA_NOT_TMPFS,
            path=config.arena_dir,
            mount=filesystems.mount_of(config.arena_dir),
            text="the arena is not on tmpfs: the kernel will write its pages to that disk, and no"
            " GPU can pin its memory, so that its pages take a copy more",
        )
    if config.nvme_dir:
        _check_nvme_room(config, log)


def _check_dram_room(config: Config, index_bytes: int, log: Log) -> None:
    free = filesystems.free_bytes(config.arena_dir)
    own = _allocated_bytes(config.arena_dir)
    need = memory.with_headers(config.dram_bytes) + index_bytes
    if need <= free + own:
        return
    mount = filesystems.mount_of(config.arena_dir)
    fits = _fitting_mebibytes(free + own - index_bytes)
    total_bytes = filesystems.total_bytes(config.arena_dir)
    total = format_size(total_bytes)
    held = f" and {format_size(own)} in this arena already" if own else ""
    # Memory that others took since must not keep the daemon from serving what it has: the arena
    # then grows no further, as it would if that happened while it runs.
    if own and need <= total_bytes:
        text = (
            f"--dram {format_size(config.dram_bytes)} does not fit now: {mount} ({total}) has "
            f"{format_size(free)} free{held}; make room there"
        )
        log.event(Event.ARENA_ROOM_SHORT, text=text, mount=mount, free_bytes=free)
        return
    raise StorageError(
        f"--dram {format_size(config.dram_bytes)} does not fit: {mount} ({total}) has "
        f"{free} bytes ({format_size(free)}) free{held}, and headers and index need "
        f"{format_size(need - config.dram_bytes)} beside it; use --dram {fits}MiB, or make room: "
        f"mount -o remount,size=SIZE {mount} (in a container: docker run --shm-size=SIZE), or name "
        "a larger tmpfs with --arena-dir",
        code="no_room",
        context={"mount": mount, "free_bytes": free, "needed_bytes": need},
    )


def _check_memory(config: Config, beside: int) -> None:
    """What tmpfs holds counts as memory of whoever touches it first, and can not be given back:
    beyond the limit the kernel kills the daemon, at every start anew."""
    limit = memory.usable_bytes()
    need = memory.with_headers(config.dram_bytes) + beside
    if need <= limit:
        return
    raise StorageError(
        f"--dram {format_size(config.dram_bytes)} does not fit: this process may use "
        f"{format_size(limit)} of memory (the machine's, or the limit of its control group), and "
        f"headers, index and the daemon itself need {format_size(need - config.dram_bytes)} beside "
        f"it; use --dram {_fitting_mebibytes(limit - beside)}MiB, or raise the limit (docker run "
        "--memory=SIZE, resources.limits.memory of a pod, MemoryMax= of a unit); large pages need "
        "fewer --index-pages, which take less",
        code="no_room",
        context={"limit_bytes": limit, "needed_bytes": need},
    )


def _fitting_mebibytes(room_bytes: int) -> int:
    """The largest --dram whose pages and headers fit."""
    share = memory.HEADERS_SHARE
    return max(0, room_bytes * share // (share + 1) >> 20)


def segment_files(nvme_dir: str) -> list[str]:
    """The files of the log in `nvme_dir`, by name; none where it cannot be looked at."""
    return sorted(glob.glob(os.path.join(glob.escape(nvme_dir), "segments", "*.seg")))


def _check_nvme_room(config: Config, log: Log) -> None:
    mount = filesystems.mount_of(config.nvme_dir)
    total = filesystems.total_bytes(config.nvme_dir)
    free = filesystems.free_bytes(config.nvme_dir)
    own = _allocated_bytes(os.path.join(config.nvme_dir, "segments"))
    capacity = config.nvme_capacity_bytes
    if capacity <= free + own:
        return
    text = (
        f"--nvme-capacity {format_size(capacity)} does not fit: {mount} ({format_size(total)}) has "
        f"{free} bytes ({format_size(free)}) free and {format_size(own)} in this tier already"
    )
    # A disk that someone else filled since must not keep the daemon from serving what it has: the
    # tier then takes what it finds, as it would if that happened while it runs.
    if own and capacity <= total:
        log.event(Event.NVME_ROOM_SHORT, text=text, mount=mount, free_bytes=free)
        return
    raise StorageError(
        f"{text}; {filesystems.free_hint(config.nvme_dir)}",
        code="no_room",
        context={"mount": mount, "free_bytes": free, "needed_bytes": capacity},
    )


def _allocated_bytes(path: str) -> int:
    """What the files directly in `path` take: sparse files count only what they have."""
    try:
        with os.scandir(path) as entries:
            found = [entry.stat(follow_symlinks=False) for entry in entries]
    except FileNotFoundError:
        return 0
    return sum(facts.st_blocks * 512 for facts in found if stat.S_ISREG(facts.st_mode))


def _is_tmpfs(path: str) -> bool:
    kind = filesystems.directory_facts(path).kind
    return kind in ("", *filesystems.MEMORY_KINDS)  # not known: say nothing


def answers(nvme_dir: str, timeout_s: float) -> bool:
    """True when a few of the blocks that a start begins with could be read, or could not, within
    `timeout_s`. Blocks for at most so long, changes nothing, raises nothing."""
    try:
        DiskCalls(timeout_s).wait_for(partial(_read, nvme_dir))
    except LateDiskError:
        return False
    return True


def _read(nvme_dir: str) -> None:
    segments = segment_files(nvme_dir)
    some = {*segments[:1], *segments[len(segments) // 2 :][:1], *segments[-1:]}
    for path in (*_files_in(nvme_dir)[:_FILES_READ], *some):
        with contextlib.suppress(OSError):  # what the start will meet too
            _read_block(path)


def _files_in(folder: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.is_file(follow_symlinks=False))
    return []


def _read_block(path: str) -> None:
    """From the device, where the filesystem permits it, and not from memory."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        fd = os.open(path, flags)
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:
            os.preadv(fd, [block], 0)
    finally:
        os.close(fd)

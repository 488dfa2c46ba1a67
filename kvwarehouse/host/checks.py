"""Judges a host for a daemon: what it is not allowed, or has too little of, to what value that is
to be set, and by which command. Judges facts; looks at nothing itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvwarehouse.host.filesystems import MEMORY_KINDS, DirectoryFacts
from kvwarehouse.host.findings import Finding, fail, ok, skip, warn
from kvwarehouse.host.limits import CoreMemory, HostLimits, Tiers
from kvwarehouse.host.memory import DAEMON_BYTES, UNLIMITED, with_headers
from kvwarehouse.sizes import format_size as size

_GIB = 1 << 30

# Two for each of 1,024 sessions, as many again for segments, and those of gRPC.
_DESCRIPTORS = 4096
_COLLAPSES = (6, 1)
"""The first kernel that gives huge pages to memory that is there (MADV_COLLAPSE)."""
_RESERVED_SHARE = 8
_LEAST_MEBIBYTES = 16
"""Of --dram."""
_ROOM_SHARE = 0.95
_LASTING = ("ext2", "ext3", "ext4", "xfs", "f2fs")
_COPIES_ON_WRITE = ("btrfs", "zfs", "bcachefs")
_LAYERS = ("overlay", "aufs")
_SCHEDULERS = ("none", "noop", "mq-deadline", "deadline")


def daemon_found(path: str, pid: int, problem: str) -> Finding:
    """pid: of the process that listens at the socket `path`; 0: of none that can be looked at.
    problem: why so, or why it does not answer; "" where it does."""
    check = "daemon"
    if not pid:
        return skip(check, f"{problem}: what follows is for one started here")
    if problem:
        return warn(
            check,
            f"process {pid} listens at {path} and does not answer: {problem}",
            "kvwarehouse debug bundle, for a report; then start it anew: its DRAM tier stays",
        )
    return ok(check, f"process {pid} at {path}; what follows is for it")


def findings_of(limits: HostLimits, core_memory: CoreMemory) -> list[Finding]:
    """All checks, in the order in which one would mend them."""
    return [
        _memory(limits, core_memory),
        _shared_memory(limits, core_memory),
        _descriptors(limits),
        _locked_memory(limits),
        _io_uring(limits),
        _huge_pages(limits),
        _nodes(limits),
        *_disk(limits),
    ]


def _memory(limits: HostLimits, core_memory: CoreMemory) -> Finding:
    check = "memory limit"
    need = _memory_bytes(limits.dram_bytes, limits, core_memory)
    wants = f"DRAM of {size(limits.dram_bytes)} takes {size(need)} with what is beside it"
    has = limits.memory_bytes
    if limits.group_bytes != UNLIMITED and limits.group_bytes < has:
        has = limits.group_bytes
        if has < need:
            to = _gibibytes(need)
            return fail(
                check,
                f"{wants}; the control group has {size(has)} ({limits.group_file}): the daemon"
                " does not start, or the kernel ends it",
                f"systemctl set-property kvwarehouse.service MemoryMax={to}G; of a container:"
                f" docker update --memory {to}g CONTAINER; or --dram"
                f" {_fitting(has, limits, core_memory)}",
            )
    if has < need:
        return fail(
            check,
            f"{wants}; this machine has {size(has)}",
            f"kvwarehouse serve --dram {_fitting(has, limits, core_memory)}",
        )
    return ok(check, f"{wants}; there are {size(has)}")


def _shared_memory(limits: HostLimits, core_memory: CoreMemory) -> Finding:
    check, arena = "shared memory", limits.arena
    index_bytes, _ = core_memory(_tiers(limits.dram_bytes, limits))
    need = with_headers(limits.dram_bytes) + index_bytes
    wants = f"DRAM of {size(limits.dram_bytes)} needs {size(need)} in {arena.path}"
    if arena.kind and arena.kind not in MEMORY_KINDS:
        return warn(
            check,
            f"{arena.path} is on {arena.kind}: the kernel writes its pages to that disk, and no"
            " GPU can pin them",
            "kvwarehouse serve --arena-dir /dev/shm/kvwarehouse",
        )
    if arena.total_bytes < need:
        to, has = _gibibytes(need), f"{wants}; {arena.mount} has {size(arena.total_bytes)}"
        if need > limits.memory_bytes:
            return fail(check, has, "a smaller --dram, as for the memory limit")
        return fail(
            check,
            has,
            f"mount -o remount,size={to}G {arena.mount}; of a container: docker run"
            f" --shm-size={to}g, or an emptyDir of medium Memory",
        )
    if not limits.pid and arena.free_bytes < need:
        return warn(
            check,
            f"{wants}; {arena.mount} has {size(arena.free_bytes)} free of"
            f" {size(arena.total_bytes)} (an arena of before may be part of the rest)",
            f"ls -l {arena.mount}: remove what nobody uses any more",
        )
    return ok(check, f"{wants}; {arena.mount} has {size(arena.total_bytes)}")


def _descriptors(limits: HostLimits) -> Finding:
    check, whose = "descriptors", _whose(limits)
    if limits.descriptors == UNLIMITED or limits.descriptors >= _DESCRIPTORS:
        return ok(check, f"{whose} may have {_shown(limits.descriptors)}")
    return warn(
        check,
        f"{whose} may have {limits.descriptors:,}; {_DESCRIPTORS:,} are enough for all sessions"
        " and segments: clients are refused, and reads of NVMe wait, when they are used up",
        "LimitNOFILE=65536 in the unit; in a shell: ulimit -Hn 65536; of a container: docker run"
        " --ulimit nofile=65536",
    )


def _locked_memory(limits: HostLimits) -> Finding:
    check, whose = "locked memory", _whose(limits)
    if limits.nvme is None:
        return ok(check, "not needed: there is no NVMe tier")
    if limits.may_lock:
        return ok(check, f"{whose} may lock all memory (CAP_IPC_LOCK)")
    if limits.memlock_bytes == UNLIMITED or limits.memlock_bytes >= limits.dram_bytes:
        return ok(check, f"{whose} may lock {_shown_bytes(limits.memlock_bytes)}")
    return warn(
        check,
        f"{whose} may lock {size(limits.memlock_bytes)} of an arena of {size(limits.dram_bytes)}:"
        " io_uring cannot register it, and reads of NVMe take more processor time",
        "LimitMEMLOCK=infinity in the unit; in a shell: ulimit -l unlimited; of a container: docker"
        " run --ulimit memlock=-1",
    )


def _io_uring(limits: HostLimits) -> Finding:
    check = "io_uring"
    slower = "the daemon reads and writes with threads, which is slower (--io-engine pread)"
    if limits.io_uring_disabled == 2 or (limits.io_uring_disabled == 1 and limits.io_uring_errno):
        return warn(
            check,
            f"kernel.io_uring_disabled is {limits.io_uring_disabled}: {slower}",
            "sysctl -w kernel.io_uring_disabled=0, and a file in /etc/sysctl.d to keep it so",
        )
    if limits.io_uring_errno and limits.filters_calls:
        return warn(
            check,
            f"refused ({os.strerror(limits.io_uring_errno)}), and there is a seccomp filter, as"
            f" container runtimes have: {slower}",
            "a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register:"
            " docker run --security-opt seccomp=PROFILE.json; of a unit:"
            " SystemCallFilter=@aio",
        )
    if limits.io_uring_errno:
        return warn(
            check,
            f"refused ({os.strerror(limits.io_uring_errno)}): {slower}",
            "a kernel with io_uring (CONFIG_IO_URING); uname -r says which runs",
        )
    return ok(check, "allowed")


def _huge_pages(limits: HostLimits) -> Finding:
    check = "huge pages"
    if limits.reserved_bytes > limits.memory_bytes // _RESERVED_SHARE:
        return warn(
            check,
            f"{size(limits.reserved_bytes)} of memory lie in reserved huge pages that nobody uses;"
            " the daemon takes none of these",
            "sysctl -w vm.nr_hugepages=0, unless another program needs them",
        )
    small = "the arena lies in small pages: the start, and each client's first load, take longer"
    if not limits.has_huge_pages:
        return warn(
            check,
            f"the kernel gives none to this process: {small}",
            "boot without transparent_hugepage=never and with CONFIG_TRANSPARENT_HUGEPAGE; check"
            " that nothing sets PR_SET_THP_DISABLE: grep THP_enabled /proc/PID/status",
        )
    if limits.kernel < _COLLAPSES:
        shown = ".".join(map(str, limits.kernel))
        return warn(
            check,
            f"Linux {shown} has no MADV_COLLAPSE: {small}",
            "a kernel of 6.1 or newer (uname -r says which runs)",
        )
    return ok(check, "the kernel gives them to the arena")


def _nodes(limits: HostLimits) -> Finding:
    check = "NUMA"
    if limits.nodes == 1:
        return ok(check, f"{_whose(limits)} has memory of one node")
    if limits.spreads:
        return ok(check, f"{limits.arena.mount} takes memory of {limits.nodes} nodes in turn")
    return warn(
        check,
        f"{_whose(limits)} may use {limits.nodes} nodes, and the arena lies where its threads"
        " happened to run: processors and GPUs of other nodes copy more slowly",
        "numactl --interleave=all kvwarehouse serve ..., or with the one node whose GPUs load:"
        " numactl --cpunodebind=0 --membind=0. What numactl sets is not seen here: this stays a"
        " warning",
    )


def _disk(limits: HostLimits) -> Iterator[Finding]:
    nvme = limits.nvme
    if nvme is None:
        yield skip("file system", "no --nvme-dir was named, and no daemon has one")
        yield skip("disk", "no --nvme-dir was named, and no daemon has one")
        return
    yield _file_system(nvme)
    yield _scheduler(nvme)


def _file_system(nvme: DirectoryFacts) -> Finding:
    check, where = "file system", f"{nvme.path} is on {nvme.kind or 'a file system'}"
    elsewhere = "kvwarehouse serve --nvme-dir on ext4 or xfs of a local NVMe disk"
    if "ro" in nvme.options:
        return fail(check, f"{where}, mounted read-only", f"mount -o remount,rw {nvme.mount}")
    if nvme.kind in MEMORY_KINDS:
        return warn(check, f"{where}, which is memory: nothing outlives the machine", elsewhere)
    if nvme.kind in _LAYERS:
        return warn(
            check,
            f"{where}, the layer of a container: it goes with the container, and is slow",
            "docker run -v /var/lib/kvwarehouse:DIR, or a volume of the pod",
        )
    if nvme.kind in _COPIES_ON_WRITE:
        return warn(
            check,
            f"{where}, which copies what is written again: reclaimed segments fragment",
            f"chattr +C {nvme.path} while it is empty (btrfs), or {elsewhere}",
        )
    if nvme.kind and nvme.kind not in _LASTING:
        return warn(check, f"{where}, on which it was never run", elsewhere)
    return ok(check, where)


def _scheduler(nvme: DirectoryFacts) -> Finding:
    check, queue = "disk", f"/sys/block/{nvme.disk}/queue"
    if not nvme.disk:
        return skip(check, f"{nvme.path} is on no disk of its own that the kernel shows here")
    if nvme.rotational:
        return warn(
            check,
            f"the kernel takes {nvme.disk} for a disk that rotates: slower than computing, if it"
            " is one",
            f"a --nvme-dir on an SSD; if this is one: echo 0 > {queue}/rotational",
        )
    if nvme.scheduler and nvme.scheduler not in _SCHEDULERS:
        return warn(
            check,
            f"{nvme.disk} has the scheduler {nvme.scheduler}, which holds back reads of an SSD",
            f"echo none > {queue}/scheduler, and a udev rule to keep it so",
        )
    return ok(check, f"{nvme.disk}, scheduler {nvme.scheduler or 'of its driver'}")


def _tiers(dram_bytes: int, limits: HostLimits) -> Tiers:
    return Tiers(
        dram_bytes, limits.nvme_bytes, index_pages=limits.index_pages, policy=limits.policy
    )


def _memory_bytes(dram_bytes: int, limits: HostLimits, core_memory: CoreMemory) -> int:
    """What a daemon with so much DRAM takes in all, as its start counts it."""
    index_bytes, table_bytes = core_memory(_tiers(dram_bytes, limits))
    return with_headers(dram_bytes) + index_bytes + table_bytes + DAEMON_BYTES


def _fitting(has_bytes: int, limits: HostLimits, core_memory: CoreMemory) -> str:
    """The largest --dram that fits, with something to spare, or the least that there is."""
    room_bytes = int(has_bytes * _ROOM_SHARE)
    fits, most = _LEAST_MEBIBYTES, room_bytes >> 20
    while fits < most:
        middle = (fits + most + 1) // 2
        if _memory_bytes(middle << 20, limits, core_memory) <= room_bytes:
            fits = middle
        else:
            most = middle - 1
    return f"{fits >> 10}GiB" if fits >= 4 << 10 else f"{fits}MiB"


def _gibibytes(size_bytes: int) -> int:
    return -(-size_bytes // _GIB)


def _whose(limits: HostLimits) -> str:
    return f"the daemon (pid {limits.pid})" if limits.pid else "a daemon that is started here"


def _shown(count: int) -> str:
    return "as many as it likes" if count == UNLIMITED else f"{count:,}"


def _shown_bytes(size_bytes: int) -> str:
    return "all memory" if size_bytes == UNLIMITED else size(size_bytes)

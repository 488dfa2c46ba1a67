"""What `kvwarehouse doctor host` says of made-up hosts: each fault is found by its one check, with
the value that it is to be set to and the command; and nothing is said of a host without any."""

from __future__ import annotations

import errno
import io
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvwarehouse import config, core
from kvwarehouse.daemon import directories
from kvwarehouse.daemon.logs import Log
from kvwarehouse.errors import StorageError
from kvwarehouse.host import (
    Finding,
    Tiers,
    Verdict,
    daemon_process,
    filesystems,
    host_limits,
    judge,
    memory,
)
from kvwarehouse.host.checks import daemon_found, findings_of
from kvwarehouse.host.daemon_process import directories_of, pid_at
from kvwarehouse.host.filesystems import DirectoryFacts, directory_facts
from kvwarehouse.host.limits import HostLimits, io_uring_errno, tiers_of, with_asked
from kvwarehouse.host.remote import RemoteFacts, remote_facts, remote_findings
from kvwarehouse.sizes import parse_size
from kvwarehouse_connectors.doctor import command
from kvwarehouse_connectors.doctor.look import core_memory

GIB = 1 << 30
LIMITS = "Max open files            1024                 {files}               files\n" + (
    "Max locked memory         {memlock}            unlimited            bytes\n"
)
STATUS = "CapEff:\t{caps}\nSeccomp:\t{seccomp}\nTHP_enabled:\t{thp}\nMems_allowed_list:\t{nodes}\n"


@dataclass
class Host:
    """Files below a made-up root. The arena and the NVMe directory are folders of it, whose sizes
    are those of the disk that the test runs on: --dram is small enough for any."""

    root: Path
    files: dict[str, str] = field(default_factory=dict)
    tiers: Tiers = field(default_factory=Tiers)
    io_uring: int = 0

    def __post_init__(self) -> None:
        self.arena, self.nvme = self.root / "shm", self.root / "disk"
        for folder in (self.arena, self.nvme, self.root / "sys/kernel/mm/transparent_hugepage"):
            folder.mkdir(parents=True)
        self.files = {
            "proc/self/status": STATUS.format(caps="0", seccomp=0, thp=1, nodes="0"),
            "proc/self/limits": LIMITS.format(files=65536, memlock="unlimited"),
            "proc/self/cgroup": "0::/a/b\n",
            "proc/meminfo": f"MemTotal: {64 << 20} kB\n",
            "proc/sys/kernel/osrelease": "6.8.0-1-x\n",
            "proc/sys/kernel/io_uring_disabled": "0\n",
            "proc/self/mounts": self.mounts("tmpfs rw", "ext4 rw"),
        }
        self.tiers = Tiers(64 << 20, 1 << 30, str(self.arena), str(self.nvme))
        device = os.stat(self.nvme).st_dev
        self.disk = f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
        self.files[f"{self.disk}/queue/scheduler"] = "[none] mq-deadline bfq\n"
        self.files[f"{self.disk}/queue/rotational"] = "0\n"

    def mounts(self, arena: str, nvme: str) -> str:
        return f"d / ext4 rw 0 0\nt {self.arena} {arena} 0 0\nd {self.nvme} {nvme} 0 0\n"

    def findings(self) -> dict[str, Finding]:
        for name, text in self.files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        limits = host_limits(self.tiers, self.root, io_uring=lambda: self.io_uring)
        return {each.check: each for each in findings_of(limits, core_memory)}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "root")


def test_host_without_a_fault_is_fit(host: Host) -> None:
    found = host.findings()
    assert {check: each.what for check, each in found.items() if each.verdict != "ok"} == {}
    assert len(found) == 9


def _set(name: str, text: str) -> Callable[[Host], None]:
    return lambda host: host.files.__setitem__(name, text)


def _mounted(arena: str = "tmpfs rw", nvme: str = "ext4 rw") -> Callable[[Host], None]:
    return lambda host: host.files.__setitem__("proc/self/mounts", host.mounts(arena, nvme))


def _queue(name: str, text: str) -> Callable[[Host], None]:
    return lambda host: host.files.__setitem__(f"{host.disk}/queue/{name}", text)


def _status(**changed: object) -> Callable[[Host], None]:
    given = {"caps": "0", "seccomp": 0, "thp": 1, "nodes": "0", **changed}
    return _set("proc/self/status", STATUS.format(**given))


def _refused(number: int, **status: object) -> Callable[[Host], None]:
    def make(host: Host) -> None:
        host.io_uring = number
        _status(**status)(host)

    return make


def _no_huge_pages(host: Host) -> None:
    (host.root / "sys/kernel/mm/transparent_hugepage").rmdir()


def _group(path: str, text: str, groups: str = "0::/a/b\n") -> Callable[[Host], None]:
    def make(host: Host) -> None:
        host.files[f"sys/fs/cgroup/{path}"] = text
        host.files["proc/self/cgroup"] = groups

    return make


V1 = "9:name=systemd:/\n4:memory,x:/pods/one\n1:cpu:/\n0::/\n"
FAULTS: list[tuple[str, Callable[[Host], None], str, Verdict, str, str]] = [
    ("group", _group("a/b/memory.max", f"{128 << 20}\n"), "memory limit", Verdict.FAIL,
     "128 MiB (/sys/fs/cgroup/a/b/memory.max)", "MemoryMax=1G"),
    ("group above", _group("a/memory.max", f"{128 << 20}\n"), "memory limit", Verdict.FAIL,
     "128 MiB (/sys/fs/cgroup/a/memory.max)", "docker update --memory 1g"),
    ("group of version 1",
     _group("memory/pods/one/memory.limit_in_bytes", f"{128 << 20}\n", V1),
     "memory limit", Verdict.FAIL, "pods/one/memory.limit_in_bytes", "MemoryMax=1G"),
    ("little memory", _set("proc/meminfo", f"MemTotal: {128 << 10} kB\n"), "memory limit",
     Verdict.FAIL, "this machine has 128 MiB", "--dram"),
    ("arena on a disk", _mounted(arena="ext4 rw"), "shared memory", Verdict.WARN, "ext4",
     "--arena-dir /dev/shm"),
    ("few descriptors", _set("proc/self/limits", LIMITS.format(files=1024, memlock="unlimited")),
     "descriptors", Verdict.WARN, "1,024; 4,096", "LimitNOFILE=65536"),
    ("memlock", _set("proc/self/limits", LIMITS.format(files=65536, memlock=8 << 20)),
     "locked memory", Verdict.WARN, "8 MiB of an arena of 64 MiB", "LimitMEMLOCK=infinity"),
    ("sysctl 2", _set("proc/sys/kernel/io_uring_disabled", "2\n"), "io_uring", Verdict.WARN,
     "kernel.io_uring_disabled is 2", "sysctl -w kernel.io_uring_disabled=0"),
    ("seccomp", _refused(errno.EPERM, seccomp=2), "io_uring", Verdict.WARN, "seccomp",
     "--security-opt seccomp="),
    ("no io_uring", _refused(errno.ENOSYS), "io_uring", Verdict.WARN, "not implemented",
     "CONFIG_IO_URING"),
    ("no huge pages", _no_huge_pages, "huge pages", Verdict.WARN, "gives none",
     "transparent_hugepage=never"),
    ("huge pages off", _status(thp=0), "huge pages", Verdict.WARN, "to this process",
     "PR_SET_THP_DISABLE"),
    ("old kernel", _set("proc/sys/kernel/osrelease", "5.15.0-1\n"), "huge pages", Verdict.WARN,
     "Linux 5.15", "6.1"),
    ("reserved", _set("sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "9\n"),
     "huge pages", Verdict.WARN, "9 GiB", "vm.nr_hugepages=0"),
    ("nodes", _status(nodes="0-1,4"), "NUMA", Verdict.WARN, "3 nodes", "numactl --interleave=all"),
    ("read-only", _mounted(nvme="ext4 ro,noatime"), "file system", Verdict.FAIL, "read-only",
     "remount,rw"),
    ("memory as a disk", _mounted(nvme="tmpfs rw"), "file system", Verdict.WARN, "memory",
     "--nvme-dir"),
    ("a container's layer", _mounted(nvme="overlay rw"), "file system", Verdict.WARN, "layer",
     "docker run -v"),
    ("copies", _mounted(nvme="btrfs rw"), "file system", Verdict.WARN, "btrfs", "chattr +C"),
    ("a network's", _mounted(nvme="nfs4 rw"), "file system", Verdict.WARN, "nfs4", "ext4 or xfs"),
    ("rotates", _queue("rotational", "1\n"), "disk", Verdict.WARN, "rotates", "queue/rotational"),
    ("scheduler", _queue("scheduler", "none mq-deadline [bfq]\n"), "disk", Verdict.WARN, "bfq",
     "echo none > /sys/block/"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "check", "verdict", "what", "fix"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_fault_is_found_by_its_check_with_value_and_command(
    host: Host, make: Callable[[Host], None], check: str, verdict: Verdict, what: str, fix: str
) -> None:
    make(host)
    found = host.findings()
    assert [name for name, each in found.items() if each.verdict != "ok"] == [check]
    assert found[check].verdict is verdict
    assert what.lower() in found[check].what.lower()
    assert fix in found[check].fix


def test_nodes_say_that_the_doctor_does_not_see_what_numactl_sets(host: Host) -> None:
    """Incident: the daemon ran under numactl as advised, and the advice came again."""
    _status(nodes="0-1")(host)
    assert "numactl sets is not seen" in host.findings()["NUMA"].fix


def test_every_check_has_a_fault_that_it_finds(host: Host) -> None:
    assert host.findings().keys() == {fault[2] for fault in FAULTS}


def test_tmpfs_that_is_too_small_or_full_is_told_with_the_size_it_needs(tmp_path: Path) -> None:
    arena = DirectoryFacts("/dev/shm", "tmpfs", "/dev/shm", total_bytes=GIB, free_bytes=GIB)
    host = Host(tmp_path / "root")
    host.findings()
    limits = replace(host_limits(host.tiers, host.root, io_uring=lambda: 0), arena=arena)

    def judged(**changed: object) -> Finding:
        (found,) = [
            f
            for f in findings_of(replace(limits, **changed), core_memory)
            if f.check == "shared memory"
        ]
        return found

    assert judged(dram_bytes=GIB // 2).verdict is Verdict.OK
    small = judged(dram_bytes=4 * GIB)
    assert small.verdict is Verdict.FAIL
    assert "mount -o remount,size=5G /dev/shm" in small.fix
    assert "--shm-size=5g" in small.fix
    assert judged(dram_bytes=99 * GIB).fix == "a smaller --dram, as for the memory limit"
    full = replace(arena, free_bytes=1 << 20)
    assert judged(dram_bytes=GIB // 2, arena=full).verdict is Verdict.WARN
    assert judged(dram_bytes=GIB // 2, arena=full, pid=7).verdict is Verdict.OK  # by its own arena


DAEMONS: list[dict[str, object]] = [
    {"dram": "1GiB"},
    {"dram": "64GiB", "nvme_capacity": "1TiB"},  # the index has 2^n places
    {"dram": "64GiB", "nvme_capacity": "15.36TB"},  # and takes a sixteenth of DRAM at most
    {"dram": "64GiB", "index_pages": 200_000_000, "policy": "adaptive"},
]


@pytest.mark.parametrize("given", DAEMONS)
def test_host_is_fit_from_the_byte_on_that_a_start_needs(
    given: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: of the second it named less than its start took, and refused the third on 125 GiB,
    of which it needed 76."""
    for name in ("arena", "nvme"):
        (tmp_path / name).mkdir()
    if "nvme_capacity" in given:
        given = {**given, "nvme_dir": str(tmp_path / "nvme")}
    settings = config.load({"arena_dir": str(tmp_path / "arena"), **given}, {})
    for check, need in needs_of_a_start(settings, monkeypatch).items():

        def verdict(has: int, check: str = check) -> Verdict:
            arena = DirectoryFacts("/a", "tmpfs", "/a", total_bytes=has, free_bytes=has)
            limits = HostLimits(
                arena,
                dram_bytes=settings.dram_bytes,
                nvme_bytes=settings.nvme_capacity_bytes,
                index_pages=settings.index_pages,
                policy=settings.policy,
                memory_bytes=has,
            )
            return {each.check: each.verdict for each in findings_of(limits, core_memory)}[check]

        assert verdict(need) is Verdict.OK
        assert verdict(need - 1) is Verdict.FAIL


def needs_of_a_start(settings: config.Config, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What it refuses by, by the doctor's check."""
    options = core.CoreOptions()
    for name in ("dram_bytes", "nvme_dir", "nvme_capacity_bytes", "index_pages", "policy"):
        setattr(options, name, getattr(settings, name))
    beside = core.index_bytes(options), core.table_bytes(options)
    found = {}
    monkeypatch.setattr(directories, "_is_tmpfs", lambda _: True)
    monkeypatch.setattr(memory, "usable_bytes", lambda: 1 << 20)
    for check, free_bytes in (("shared memory", 1 << 20), ("memory limit", 1 << 60)):
        monkeypatch.setattr(filesystems, "free_bytes", lambda _, free=free_bytes: free)
        with pytest.raises(StorageError) as caught:
            directories.check_room(settings, *beside, Log("json", io.StringIO()))
        found[check] = int(caught.value.context["needed_bytes"])
    return found


@pytest.mark.parametrize("has", ["300MiB", "8GiB", "125GiB"])
def test_dram_that_is_advised_fits(has: str) -> None:
    limits = HostLimits(
        DirectoryFacts("/a", "tmpfs", "/a", total_bytes=1 << 50, free_bytes=1 << 50),
        dram_bytes=1 << 40,
        nvme_bytes=1 << 40,
        memory_bytes=parse_size(has),
    )
    advice = findings_of(limits, core_memory)[0]
    assert advice.verdict is Verdict.FAIL
    advised = parse_size(advice.fix.rpartition(" ")[2])
    assert advised > limits.memory_bytes // 3
    fits = replace(limits, dram_bytes=advised)
    assert findings_of(fits, core_memory)[0].verdict is Verdict.OK


def test_index_of_a_daemon_counts_as_it_is_unless_other_capacities_are_asked_for() -> None:
    status = {"core": {"index": {"capacity": 1 << 27}, "policy": "adaptive"}}
    tiers = tiers_of(0, status)
    assert (tiers.index_pages, tiers.policy) == (1 << 27, "adaptive")
    assert with_asked(tiers, Tiers(arena_dir="/a")).index_pages == 1 << 27
    assert with_asked(tiers, Tiers(1 << 30)).index_pages == 0
    assert with_asked(tiers, Tiers(1 << 30, index_pages=5)).index_pages == 5
    assert core_memory(replace(tiers, policy="of a newer daemon")) > core_memory(Tiers(1 << 30))


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (_set("proc/sys/kernel/io_uring_disabled", "1\n"), "io_uring"),  # and we may all the same
        (_group("a/b/memory.max", "max\n"), "memory limit"),
        (_group("a/b/memory.max", f"{256 << 20}\n"), "memory limit"),  # `serve` starts there too
        (_mounted(arena="tmpfs rw,mpol=interleave:0-1"), "NUMA"),
        (_group("memory/x/memory.limit_in_bytes", "99\n", "1:cpu:/x\n0::/\n"), "memory limit"),
        (_mounted(nvme="ext4 rw,errors=remount-ro"), "file system"),
        (_queue("scheduler", "none [mq-deadline]\n"), "disk"),
    ],
)
def test_what_does_no_harm_is_no_fault(
    host: Host, make: Callable[[Host], None], check: str
) -> None:
    if check == "NUMA":
        _status(nodes="0-1")(host)
    make(host)
    assert host.findings()[check].verdict is Verdict.OK


def test_right_to_lock_makes_a_limit_harmless(host: Host) -> None:
    _set("proc/self/limits", LIMITS.format(files=65536, memlock=65536))(host)
    _status(caps="4000")(host)
    assert host.findings()["locked memory"].verdict is Verdict.OK


def test_without_an_nvme_tier_its_checks_are_left_out(host: Host) -> None:
    host.tiers = replace(host.tiers, nvme_dir="")
    _set("proc/self/limits", LIMITS.format(files=65536, memlock=65536))(host)
    found = host.findings()
    assert {name for name, each in found.items() if each.verdict == "skip"} == {
        "file system",
        "disk",
    }
    assert found["locked memory"].verdict is Verdict.OK


def test_limits_are_those_of_the_daemon_where_one_runs(host: Host) -> None:
    host.tiers = replace(host.tiers, pid=7)
    _set("proc/7/limits", LIMITS.format(files=512, memlock="unlimited"))(host)
    assert "the daemon (pid 7) may have 512" in host.findings()["descriptors"].what


def test_directories_of_a_daemon_are_those_of_its_open_files(tmp_path: Path) -> None:
    folder = tmp_path / "proc/7/fd"
    folder.mkdir(parents=True)
    proc = tmp_path / "proc"
    assert directories_of(7, proc) == ("", "")
    (folder / "3").symlink_to("socket:[1]")
    (folder / "4").symlink_to("/dev/shm/kvw/arena")
    (folder / "5").symlink_to("/dev/shm/kvw/ledger.mdb")
    assert directories_of(7, proc) == ("/dev/shm/kvw", "")
    (folder / "6").symlink_to("/disk/kvw/ledger.mdb")
    assert directories_of(7, proc) == ("/dev/shm/kvw", "/disk/kvw")
    (folder / "7").symlink_to("/nvme/kvw/segments/0001.seg (deleted)")
    assert directories_of(7, proc) == ("/dev/shm/kvw", "/nvme/kvw")
    assert directories_of(8, proc) == ("", "")


def test_directory_that_is_not_there_is_judged_by_what_it_would_be_made_in(tmp_path: Path) -> None:
    facts = directory_facts(str(tmp_path / "not" / "yet"))
    assert facts.path.endswith("not/yet")
    assert facts.total_bytes >= facts.free_bytes > 0
    assert facts.kind
    assert tmp_path.is_relative_to(facts.mount)


def test_mount_is_the_last_one_at_the_nearest_place_that_has_one(tmp_path: Path) -> None:
    """Also a bind mount, which is on the device of the folder above it."""
    place = tmp_path / "a disk"
    (place / "kvw").mkdir(parents=True)
    shown = str(place).replace(" ", "\\040")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(
        f"/dev/a / ext4 rw 0 0\n/dev/b {shown} xfs rw 0 0\n/dev/c {shown} btrfs ro,noatime 0 0\n"
    )
    facts = directory_facts(str(place / "kvw"), tmp_path)
    assert (facts.device, facts.mount, facts.kind) == ("/dev/c", str(place), "btrfs")
    assert facts.options == ("ro", "noatime")
    assert directory_facts(str(tmp_path), tmp_path).device == "/dev/a"


def test_daemon_is_told_by_what_it_answers() -> None:
    assert daemon_found("/s", 7, "").verdict is Verdict.OK
    silent = daemon_found("/s", 7, "no answer in 5 s")
    assert silent.verdict is Verdict.WARN
    assert "debug bundle" in silent.fix
    none = daemon_found("/s", 0, "none at unix:///s")
    assert none.verdict is Verdict.SKIP
    assert none.what == "none at unix:///s: what follows is for one started here"


def test_process_behind_a_socket_is_found(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with pytest.raises(OSError, match="No such file"):
        pid_at(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        assert pid_at(path) == os.getpid()


def test_process_of_another_pid_namespace_is_told_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives 0 for the number of a process that has none here."""
    path = str(tmp_path / "s")
    monkeypatch.setattr(
        daemon_process, "_CREDENTIALS", SimpleNamespace(size=12, unpack=lambda _: (0, 0, 0))
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        found = judge(f"unix://{path}", path, "", {}, Tiers(16 << 20), core_memory)[0]
    assert found.verdict is Verdict.SKIP
    assert "of another pid namespace" in found.what
    found = judge("unix:///x", "/x", "no daemon", {}, Tiers(16 << 20), core_memory)[0]
    assert found.what.startswith("none at")


def test_kernel_is_asked_without_making_a_ring() -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert io_uring_errno() in (0, errno.EPERM, errno.ENOSYS)
    # Fewer, where one of a test before this one is collected meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before


def test_command_judges_what_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--address", f"unix://{tmp_path}/none.sock", "--nvme-dir", str(tmp_path)]
    assert command(["host", "--dram", "900TiB", *where]) == 1
    told = capsys.readouterr().out
    assert "DRAM of 900 TiB" in told
    assert f"{tmp_path} is on" in told
    assert "host cannot serve yet" in told
    pages = ["--index-pages", "1000000000", "--policy", "adaptive"]
    assert command(["host", "--dram", "64MiB", *where, *pages]) == 1
    assert "64 MiB needs 128 GiB in" in capsys.readouterr().out
    for wrong in (["--dram", "much"], ["--index-pages", "-1"], ["--policy", "none"]):
        with pytest.raises(SystemExit):
            command(["host", *wrong])


def test_host_without_a_remote_tier_is_asked_nothing_of_one(tmp_path: Path) -> None:
    found = judge(
        "a",
        f"{tmp_path}/none.sock",
        "none",
        {"remote": {"url": "", "state": ""}},
        Tiers(),
        core_memory,
    )
    assert not [each for each in found if each.check in ("remote tier", "fleet secret")]


@pytest.mark.parametrize(
    ("facts", "verdict", "word"),
    [
        (RemoteFacts("s3://kv", has_obstore=False), Verdict.FAIL, "kvwarehouse[remote]"),
        (RemoteFacts("file:///mnt/kv", folder_is_there=False), Verdict.FAIL, "mount it"),
        (RemoteFacts("s3://kv", "refused", "AccessDenied"), Verdict.WARN, "AccessDenied"),
        (RemoteFacts("s3://kv", "serving"), Verdict.OK, "is serving"),
        (RemoteFacts("s3://kv", "starting"), Verdict.OK, "is starting"),
        (RemoteFacts("s3://kv"), Verdict.OK, "is named"),
    ],
)
def test_remote_tier_is_judged_by_what_it_needs(
    facts: RemoteFacts, verdict: Verdict, word: str
) -> None:
    [found] = remote_findings(facts)
    assert found.verdict is verdict
    assert word in found.what + found.fix


def test_remote_tier_of_a_daemon_is_the_one_that_it_says(tmp_path: Path) -> None:
    status = {"remote": {"url": f"file://{tmp_path}/gone", "state": "failing", "reason": "EIO"}}
    assert not remote_facts("", "", status).folder_is_there
    (tmp_path / "gone").mkdir()
    found = remote_facts("", "", status)
    assert (found.state, found.reason, found.folder_is_there) == ("failing", "EIO", True)
    assert not found.secret_problem


def test_fleet_secret_that_would_be_refused_is_named_before_the_start(tmp_path: Path) -> None:
    secret = tmp_path / "secret"

    def problem() -> str:
        facts = remote_facts("s3://kv?sig=planted", str(secret), {})
        assert "planted" not in str(facts)
        return facts.secret_problem

    assert str(secret) in problem()
    secret.write_bytes(b"x" * 31)
    secret.chmod(0o644)
    assert "chmod 600" in problem()
    secret.chmod(0o600)
    assert "31 bytes" in problem()
    secret.write_bytes(b"x" * 32)
    assert problem() == ""
    assert remote_facts("s3://kv", "", {}).secret_problem == "there is none"
    last = remote_findings(remote_facts("s3://kv", "", {}))[-1]
    assert (last.check, last.verdict) == ("fleet secret", Verdict.FAIL)

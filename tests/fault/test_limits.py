"""A daemon of which more is asked than it has: sessions, file handles, pinned memory, disk, sizes
of messages, namespaces. It says what the bound is and refuses or evicts, goes on serving those it
has, and its own memory stays bounded. The bounds of the gRPC service have their tests in
tests/integration/test_service_bounds.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import core, wire
from kvwarehouse_bench.harness.client_process import ClientProcess
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit import tally
from testkit.known_prompt import KnownPrompt

pytestmark = pytest.mark.timeout(600)

PAGE_BYTES = 60_000
SLOT_BYTES = 61_440  # the same in blocks of 4 KiB
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
MORE_MEMORY_MIB = 64  # that overload may cost a daemon for good
HANDLES_TO_SPARE = 3


class Confined(Serving):
    """A daemon in a control group of its own that may use so much memory, tmpfs included."""

    def __init__(self, disk: Path, limit_bytes: int, **settings: str) -> None:
        super().__init__(disk, **settings)
        version_1 = Path("/sys/fs/cgroup/memory")
        root, name = (
            (version_1, "memory.limit_in_bytes")
            if version_1.exists()
            else (Path("/sys/fs/cgroup"), "memory.max")
        )
        self._group = root / f"kvw-test-{os.getpid()}"
        try:
            self._group.mkdir()
            (self._group / name).write_text(str(limit_bytes))
        except OSError as error:
            self.remove()
            pytest.skip(f"needs a control group of its own for memory: {error}")

    def command(self) -> list[str]:
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", enter, str(self._group / "cgroup.procs"), *super().command()]

    def remove(self) -> None:
        super().remove()
        with contextlib.suppress(FileNotFoundError):
            self._group.rmdir()


class Watched:
    """A daemon with one good client, which must be served whatever the others do."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.client = serving.connect(timeout_s=60)
        self.ns = self.client.open(SPACE)
        self.prompts = 0
        self.check_serves()
        self.before_mib = self.memory_mib()

    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.serving.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    @property
    def core(self) -> Any:
        return self.client.status()["core"]

    def store(self, pages: int, client: kvw.Client | None = None) -> tuple[list[int], Any]:
        nodes = [self.prompts << 12 | place for place in range(pages)]
        self.prompts += 1
        ns = self.ns if client is None else client.open(SPACE)
        return nodes, ns.store(nodes, pages_of(nodes, 0, 0, PAGE_BYTES), timeout_s=30)

    def load(self, nodes: list[int]) -> int:
        out = np.zeros((len(nodes), PAGE_BYTES), np.uint8)
        loaded = self.ns.load(nodes, out, timeout_s=30)
        check_pages(out[:loaded], nodes[:loaded], 0, 0)
        return int(loaded)

    def hears_of(self, pins: int) -> None:
        """Returns once clients are told what so many pins leave of the arena."""
        arena_bytes = self.core["tiers"]["dram"]["capacity_bytes"]
        left = min(arena_bytes // 2, arena_bytes - pins * SLOT_BYTES)
        eventually(lambda: self.client.control().pin_limit_bytes == left, "pins are seen")

    def check_serves(self) -> None:
        nodes, result = self.store(4)
        assert result.stored == 4, result
        assert self.load(nodes) == 4

    def check_bounded(self) -> None:
        self.check_serves()
        more = self.memory_mib() - self.before_mib
        assert more < MORE_MEMORY_MIB, f"overload has cost the daemon {more:.0f} MiB"


@contextlib.contextmanager
def watched(disk: Path, **settings: str) -> Iterator[Watched]:
    settings = {"dram": "16MiB", "grace_s": "0.1", **settings}
    with Serving(disk, **settings) as serving:
        watched = Watched(serving)
        try:
            yield watched
        finally:
            watched.client.close()


# --- memory of a container


def test_dram_beyond_its_containers_memory_is_refused_and_what_is_offered_fits(
    tmp_path: Path,
) -> None:
    """Incident: `ready`, and a second later killed by the kernel, at every start anew."""
    limit_bytes = 220 << 20
    serving = Confined(tmp_path, limit_bytes, dram="512MiB")
    try:
        with pytest.raises(RefusedError, match="no_room") as caught:
            serving.start()
        offered = re.search(r"use --dram (\d+)MiB", caught.value.text)
        assert offered is not None, caught.value.text
        serving.settings["dram"] = f"{offered[1]}MiB"
        serving.start()
        daemon = Watched(serving)
        eventually(lambda: daemon.core["tiers"]["dram"]["health"] == "ok", "an arena in full size")
        stored = 0
        while stored * PAGE_BYTES < 2 * int(offered[1]) << 20:
            stored += daemon.store(256)[1].stored
        daemon.check_serves()
        daemon.client.close()
        assert serving.stop() == 0
    finally:
        serving.remove()


# --- sessions and file handles


def connect_until_refused(serving: Serving, crowd: list[Any]) -> None:
    while len(crowd) < 5000:
        crowd.append(core.NativeClient(serving.socket, True, 30.0))


def test_smaller_dram_than_the_arena_has_waits_for_its_clients_and_loses_nothing_of_nvme(
    tmp_path: Path,
) -> None:
    """Incident: it was refused until somebody removed the directory, and the refusal said neither
    its size nor what giving it up would cost."""
    prompt = KnownPrompt("m", pages=12, page_bytes=20_000)
    with Serving(tmp_path, dram="32MiB", nvme_capacity="64MiB") as serving:
        with serving.connect(timeout_s=60) as client:
            prompt.store_whole(client)
            assert client.flush(60).pending == 0
            dram = lambda: client.status()["core"]["tiers"]["dram"]  # noqa: E731
            eventually(lambda: dram()["health"] == "ok", "all of its memory is taken")
            assert serving.stop() == 0
            serving.settings["dram"] = "16MiB"
            with pytest.raises(RefusedError, match="to --dram 16MiB while clients") as refused:
                serving.start()
            assert "stop them, start with --dram 32MiB, or" in refused.value.text
        serving.start()
        assert serving.events("core")[0]["name"] == "arena_shrunk"
        with serving.connect(timeout_s=60) as client:
            assert client.status()["core"]["tiers"]["dram"]["capacity_bytes"] <= 16 << 20
            assert prompt.load(client) == prompt.pages


# Takes all that it gets, and keeps it.
CROWD = """
from kvwarehouse import core
crowd = []
try:
    while True:
        crowd.append(core.NativeClient(given["socket"], True, 30.0))
except kvw.CapacityError as error:
    say([len(crowd) + 1, error.code])
hear()
"""


def test_sessions_beyond_the_bound_are_refused_and_there_is_room_when_some_end(
    tmp_path: Path,
) -> None:
    with watched(tmp_path) as daemon:
        own = daemon.core["sessions"]
        for _ in range(tally.rounds(1)):
            crowd: list[Any] = []
            with ClientProcess(daemon.serving.address, CROWD, socket=daemon.serving.socket) as one:
                half, code = one.hear()
                assert code == "too_many_sessions"  # of a process; this one goes on
                with pytest.raises(kvw.CapacityError) as caught:
                    connect_until_refused(daemon.serving, crowd)
                assert caught.value.code == "too_many_sessions"
                bound = half + len(crowd) + own
                assert bound == 2 * half
                for said in (bound, half):  # the bounds, to the client
                    assert str(said) in caught.value.message
                daemon.check_serves()
                one.tell("end")
            tally.count("sessions up to the bound, and one more", half + len(crowd) + 2)
            for client in crowd:
                client.close()
            eventually(lambda: daemon.core["sessions"] == own, "the sessions of those who left end")
            with daemon.serving.connect(timeout_s=30) as late:
                late.open(SPACE)
            eventually(lambda: daemon.core["sessions"] == own, "the late one's session ends too")
            daemon.check_bounded()


def connect_or_code(serving: Serving, crowd: list[Any]) -> str:
    """ "", or why not; it is worth another try."""
    try:
        crowd.append(core.NativeClient(serving.socket, True, 5.0))
    except (kvw.CapacityError, kvw.TransportError) as error:
        return error.code if error.retryable else f"for good: {error}"
    return ""


def test_daemon_without_file_handles_serves_those_it_has_and_others_once_it_has_some(
    tmp_path: Path,
) -> None:
    sizes = {"nvme_capacity": "32MiB", "nvme_segment": "2MiB", "nvme_retry_s": "0.2"}
    with watched(tmp_path, **sizes) as daemon:
        pid = daemon.serving.pid
        usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        for _ in range(tally.rounds(1)):
            highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + HANDLES_TO_SPARE, usual[1]))
            crowd: list[Any] = []
            codes = [connect_or_code(daemon.serving, crowd) for _ in range(20)]
            assert "no_file_handles" in codes, codes
            refused = sum(code != "" for code in codes)
            nodes, result = daemon.store(12)  # local: needs no handle
            assert result.stored == 12
            assert daemon.load(nodes) == 12
            resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
            for client in crowd:
                client.close()
            with daemon.serving.connect(timeout_s=60) as late:
                late.open(SPACE)
            eventually(
                lambda: daemon.core["tiers"]["nvme"]["health"] == "ok", "the NVMe tier recovers"
            )
            tally.count("connection while the daemon has no file handle left", refused)
        daemon.check_bounded()


# --- memory, pins, disk


# Two sessions that pin what they are told, until nobody gives them more; [] releases all.
PINNING = """
sessions = [client, kvw.connect(address)]
opened = [each.open(kvw.Namespace(**given["space"])) for each in sessions]
held = [[], []]
while True:
    turn, nodes = hear()
    if not nodes:
        for pins in held[0] + held[1]:
            pins.release()
        held = [[], []]
        say(None)
        continue
    try:
        held[turn].append(opened[turn].pin(nodes, timeout_s=30))
        say(held[turn][-1].pages)
    except kvw.PinError as refused:
        say(refused.code)
"""


class Pinning(ClientProcess):
    def __init__(self, serving: Serving) -> None:
        super().__init__(serving.address, PINNING, space=SPACE.to_fields())

    def pin(self, nodes: list[int], session: int = 0) -> Any:
        """How many pages of it, or the code of the refusal."""
        self.tell([session, nodes])
        return self.hear()

    def release(self) -> None:
        self.tell([0, []])
        assert self.hear() is None


def test_processes_that_pin_all_they_may_leave_room_for_stores(tmp_path: Path) -> None:
    """Incident: each could pin half of the arena, so two of them filled it, and every store was
    refused."""
    with watched(tmp_path) as daemon, contextlib.ExitStack() as stack:
        processes = [stack.enter_context(Pinning(daemon.serving)) for _ in range(3)]
        for _ in range(tally.rounds(1)):
            held: list[list[int]] = []
            full: set[int] = set()  # processes that may pin no more
            while len(full) < len(processes):
                number = len(held) % len(processes)
                nodes, result = daemon.store(16)
                assert result.stored == 16, result
                pages = processes[number].pin(nodes)
                held.append(nodes if pages == 16 else [])
                full = full | {number} if pages == "pin_budget" else full - {number}
                daemon.hears_of(sum(map(len, held)))
            for _ in range(50):
                assert daemon.store(4)[1].stored == 4
            pinned = [sum(map(len, held[number::3])) for number in range(3)]
            assert 0 < max(pinned) <= min(pinned) + 16, f"of three alike: {pinned}"
            assert all(daemon.load(nodes) == len(nodes) for nodes in held), "a pinned page has left"
            tally.count("store beside processes that pin all that they may", 50)
            for each in processes:
                each.release()
            daemon.hears_of(0)
        daemon.check_bounded()


def test_pins_beyond_a_process_s_budget_are_refused_and_cost_no_other_process_anything(
    tmp_path: Path,
) -> None:
    with watched(tmp_path) as daemon, Pinning(daemon.serving) as greedy:
        nodes, result = daemon.store(32)
        assert result.stored == 32
        for _ in range(tally.rounds(1)):
            times = 0
            while (answer := greedy.pin(nodes)) == 32:
                times += 1
            assert answer == "pin_budget"
            assert greedy.pin(nodes, session=1) == "pin_budget", "another session pins more"
            limit_bytes = daemon.core["tiers"]["dram"]["capacity_bytes"] / 2
            assert times * 32 * PAGE_BYTES <= limit_bytes < (times + 2) * 32 * PAGE_BYTES
            assert daemon.core["pins"]["refused"] > 0
            with daemon.ns.pin(nodes, timeout_s=30) as other:
                assert other.pages == 32
            greedy.release()
            assert greedy.pin(nodes, session=1) == 32
            greedy.release()
            tally.count("pin beyond a process's budget")
        daemon.check_bounded()


def test_files_of_the_nvme_tier_never_exceed_its_capacity(tmp_path: Path) -> None:
    sizes = {"nvme_capacity": "16MiB", "nvme_segment": "2MiB", "flush_interval_s": "0.05"}
    with watched(tmp_path, **sizes) as daemon:
        for _ in range(tally.rounds(1)):
            for _ in range(12):
                nodes, result = daemon.store(48)
                assert result.stored == 48
                files = sum(path.stat().st_size for path in daemon.serving.segments)
                assert files <= 16 << 20, f"{files} bytes in a tier of 16 MiB"
                assert daemon.load(nodes) == 48
                # However slow the disk is: all of it is written.
                assert daemon.client.flush(60).pending == 0
            nvme = daemon.core["tiers"]["nvme"]
            assert nvme["used_bytes"] <= nvme["capacity_bytes"] <= 16 << 20
            tally.count("twice the NVMe tier's capacity stored")
        assert daemon.core["tiers"]["nvme"]["reclaimed_segments"] > 0
        daemon.check_bounded()


def pages_lost_by_shrinking(serving: Serving) -> list[int]:
    told = [each for each in serving.events("core") if each["name"] == "nvme_shrunk"]
    return [int(each["pages"]) for each in told]


def start_with_nvme_alone(serving: Serving, capacity: str) -> None:
    """As after a boot: nothing of the arena is left."""
    assert serving.stop() == 0
    shutil.rmtree(serving.arena_dir)
    serving.settings["nvme_capacity"] = capacity
    serving.start()


def test_smaller_nvme_capacity_keeps_the_pages_that_fit_it(tmp_path: Path) -> None:
    """Incident: 20 MiB in one segment of 64 MiB, and a capacity of 64 MiB. All pages were dropped
    for the sake of smaller segments, and no line said so."""
    prompts = [KnownPrompt(f"m{i}", pages=80, page_bytes=65_536) for i in range(4)]
    with Serving(tmp_path, dram="32MiB", nvme_capacity="512MiB") as serving:
        with serving.connect(timeout_s=60) as client:
            for prompt in prompts:
                prompt.store_whole(client)
                assert client.flush(60).pending == 0
        start_with_nvme_alone(serving, "64MiB")
        with serving.connect(timeout_s=60) as client:
            for prompt in prompts:
                assert prompt.load(client) == prompt.pages
            nvme = client.status()["core"]["tiers"]["nvme"]
            assert nvme["pages"] == sum(prompt.pages for prompt in prompts)
            assert sum(path.stat().st_size for path in serving.segments) <= 64 << 20
        assert pages_lost_by_shrinking(serving) == []


def test_smaller_nvme_capacity_says_how_many_pages_it_cost(tmp_path: Path) -> None:
    prompt = KnownPrompt("m", pages=60, page_bytes=1 << 20)  # one segment, nearly full
    with Serving(tmp_path, dram="128MiB", nvme_capacity="512MiB") as serving:
        with serving.connect(timeout_s=60) as client:
            prompt.store_whole(client)
            assert client.flush(60).pending == 0
        start_with_nvme_alone(serving, "64MiB")
        with serving.connect(timeout_s=60) as client:
            kept = client.open(prompt.space).lookup(prompt.nodes).pages
            assert 32 <= kept < prompt.pages
            assert prompt.load(client) == kept
            assert sum(path.stat().st_size for path in serving.segments) <= 64 << 20
        assert pages_lost_by_shrinking(serving) == [prompt.pages - kept]


# --- sizes


def test_prompt_at_the_bound_is_served_and_one_beyond_it_refused(tmp_path: Path) -> None:
    with watched(tmp_path) as daemon, daemon.serving.connect_remote(timeout_s=60) as remote:
        longest = np.arange(wire.MAX_TOKENS, dtype=np.uint32)[::-1].copy()  # stored by nobody
        for client in (daemon.client, remote):
            ns = client.open(SPACE)
            assert ns.lookup(longest).pages == 0
            with pytest.raises(kvw.UsageError) as caught:
                ns.lookup(np.append(longest, np.uint32(1)))
            assert caught.value.code == "too_many_tokens"
            assert str(wire.MAX_TOKENS) in caught.value.message.replace(",", "")
            tally.count("prompt beyond the longest that there may be")
        daemon.check_bounded()


def test_messages_of_any_size_and_content_end_only_their_own_connection(
    tmp_path: Path, rng: random.Random
) -> None:
    bound = 128 << 10
    with watched(tmp_path) as daemon:
        for size in [0, 1, 31, 32, 33, bound - 1, bound, bound + 1, bound + 4096] * tally.rounds(4):
            head = b"KVW1" + rng.randbytes(28) if rng.random() < 0.5 else rng.randbytes(32)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                raw.settimeout(30)
                raw.connect(daemon.serving.socket)
                with contextlib.suppress(OSError):
                    raw.send((head + rng.randbytes(max(0, size - 32)))[:size])
                    raw.send(head)
            tally.count("message at or beyond the bound, or of noise, on the local socket")
        daemon.check_bounded()


# --- namespaces


def test_namespaces_up_to_the_bound_are_opened_and_one_more_takes_an_empty_ones_place(
    tmp_path: Path,
) -> None:
    """The bound itself takes a while: where there is time for it."""
    whole = tally.rounds(1) > 1
    with watched(tmp_path) as daemon:
        wanted = core.MAX_NAMESPACES if whole else 256
        for number in range(1, wanted):
            daemon.client.open(other_space(number))
        assert len(list(daemon.client.namespaces())) == wanted
        if whole:
            daemon.client.open(other_space(wanted))
            listed = [each.id for each in daemon.client.namespaces()]
            assert len(listed) == wanted
            assert other_space(wanted).id in listed
            assert other_space(1).id not in listed
        tally.count("namespace opened, up to the bound and beyond", wanted)
        daemon.check_bounded()


def other_space(number: int) -> kvw.Namespace:
    return kvw.Namespace(**{**SPACE.to_fields(), "salt": str(number)})

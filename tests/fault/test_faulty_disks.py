"""Disks that fill up, turn read-only, fail, stall or lose what they had, under a real daemon.

The DRAM tier keeps serving, what the daemon says of itself is true (status, metrics, /healthz), it
recovers by itself, nothing wrong is loaded, and what was reported durable is there afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually, longer_bounds
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import RefusedError, Serving
from testkit import mounts, tally
from testkit.faulty_disk import FaultyDisk

pytestmark = pytest.mark.timeout(600)

PAGE_BYTES = 64 << 10
PROMPT = 12
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE_BYTES
)
SIZES = {
    "dram": "32MiB",
    "nvme_capacity": "32MiB",
    "nvme_segment": "2MiB",
    "grace_s": "0.1",
    "flush_interval_s": "0.05",
    "nvme_retry_s": "0.2",
}


class Use:
    """A daemon in use: prompts that were stored, those of them that were reported durable."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.prompts = self.first = 0
        self.durable: list[int] = []
        self.connect()

    def connect(self) -> None:
        self.client = self.serving.connect(timeout_s=60)
        self.ns = self.client.open(SPACE)

    @property
    def nvme(self) -> Any:
        return self.client.status()["core"]["tiers"]["nvme"]

    def nodes(self, prompt: int) -> list[int]:
        return [prompt << 8 | place for place in range(PROMPT)]

    def store(self, prompts: int = 4) -> None:
        """New ones; and loads them."""
        for prompt in range(self.prompts, self.prompts + prompts):
            nodes = self.nodes(prompt)
            result = self.ns.store(nodes, pages_of(nodes, 0, 0, PAGE_BYTES), timeout_s=60)
            assert result.stored == PROMPT, result
        self.prompts += prompts
        for prompt in range(self.prompts - prompts, self.prompts):
            assert self.load(prompt) == PROMPT

    def load(self, prompt: int) -> int:
        """Pages, each byte of them judged."""
        nodes = self.nodes(prompt)
        out = np.zeros((PROMPT, PAGE_BYTES), np.uint8)
        loaded = self.ns.load(nodes, out, timeout_s=60)
        check_pages(out[:loaded], nodes[:loaded], 0, 0)
        return int(loaded)

    def flush(self) -> None:
        """All that is stored is durable now."""
        result = self.client.flush(60)
        assert result.pending == result.not_admitted == 0, result
        self.durable = list(range(self.first, self.prompts))

    def forget(self) -> None:
        """Room for the next round."""
        self.client.clear(SPACE)
        self.first, self.durable = self.prompts, []

    def check_says(self, health: str, reason: str = "") -> None:
        """Status and metrics agree, and the daemon is alive and takes work."""

        def said() -> bool:
            return (self.nvme["health"], self.nvme["reason"]) == (health, reason)

        eventually(said, f"the status says {health} {reason}")
        scraped = self.serving.metrics()
        assert scraped[f'kvwarehouse_nvme_health{{health="{health}"}}'] == 1
        address = self.serving.events("ready")[0]["http"]
        for path in ("healthz", "readyz"):
            with urllib.request.urlopen(f"http://{address}/{path}", timeout=60) as answer:
                assert answer.status == 200

    def check_recovers(self) -> None:
        """By itself; then everything can be made durable again, and is."""
        self.check_says("ok")
        self.store(1)

        def flushed() -> bool:
            result = self.client.flush(60)
            return result.pending == result.not_admitted == 0

        eventually(flushed, "what DRAM alone had goes to NVMe")
        self.durable = list(range(self.first, self.prompts))

    def check_durable(self, *, again: bool = True) -> None:
        """Power is lost now: what was reported durable is there, and right."""
        self.client.close()
        self.serving.kill()
        self.serving.lose_arena()
        self.serving.start()
        self.connect()
        for prompt in self.durable:
            assert self.load(prompt) == PROMPT


@pytest.fixture
def private_mounts() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("mounting filesystems needs root")
    with contextlib.ExitStack() as stack:
        with skipped_where_impossible():
            stack.enter_context(mounts.own_mounts())
        yield


@contextlib.contextmanager
def skipped_where_impossible() -> Iterator[None]:
    try:
        yield
    except mounts.NoMountsError as error:
        pytest.skip(f"cannot mount here: {error}")


@contextlib.contextmanager
def used(serving: Serving) -> Iterator[Use]:
    with serving:
        use = Use(serving)
        try:
            yield use
        finally:
            use.client.close()


# --- a disk that really is full


def test_full_disk_leaves_pages_in_dram_and_takes_them_when_it_has_room_again(
    private_mounts: None, tmp_path: Path
) -> None:
    with skipped_where_impossible():
        mounts.mount_tmpfs(tmp_path / "disk", "40m")
    filler = tmp_path / "disk" / "filler"
    with used(Serving(tmp_path / "disk", **SIZES)) as use:
        for _ in range(tally.rounds(1)):
            use.store(2)
            use.flush()
            fill(filler)
            use.store(20)  # more than the segments that are there take
            result = use.client.flush(60)
            assert result.pending == 0
            filler.unlink()
            use.check_recovers()
            use.check_durable()
            use.forget()
            tally.count("disk filled up by others, then emptied (tmpfs)")


def test_disk_that_was_full_from_the_start_is_used_once_it_has_room(
    private_mounts: None, tmp_path: Path
) -> None:
    with skipped_where_impossible():
        mounts.mount_tmpfs(tmp_path / "disk", "40m")
    filler = tmp_path / "disk" / "filler"
    serving = Serving(tmp_path / "disk", **SIZES)
    with used(serving) as use:
        fill(filler)
        use.store(2)
        use.check_says("read_only", "no_space")
        assert use.client.flush(60).not_admitted == 2 * PROMPT
        use.store(2)
        filler.unlink()
        use.check_recovers()
        use.check_durable()
        tally.count("disk full from the start, then emptied (tmpfs)")


def fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


# --- a filesystem that really is read-only, a device that really lost what it had


def test_filesystem_that_is_read_only_at_the_start_is_read_and_written_once_it_can_be(
    private_mounts: None, tmp_path: Path
) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    with skipped_where_impossible():
        mounts.mount_image(disk, image, 96 << 20)
    serving = Serving(disk, **SIZES)
    with used(serving) as use:
        use.store(4)
        use.flush()
        for _ in range(tally.rounds(1)):
            use.client.close()
            assert serving.stop() == 0
            serving.lose_arena()
            mounts.remount(disk, "ro")
            serving.start()
            use.connect()
            use.check_says("read_only", "read_only")
            for prompt in use.durable:
                assert use.load(prompt) == PROMPT
            use.store(2)
            mounts.remount(disk, "rw")
            use.check_recovers()
            use.check_durable()
            tally.count("filesystem read-only, then writable (ext4)")


def test_device_that_lost_its_end_gives_misses_and_nothing_wrong(
    private_mounts: None, tmp_path: Path
) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    with skipped_where_impossible():
        mounts.mount_image(disk, image, 96 << 20)
    with used(Serving(disk, **SIZES)) as use:
        use.store(20)
        use.flush()
        use.client.evict(SPACE, 100_000, "dram")
        os.truncate(image, 24 << 20)
        found = [use.load(prompt) for prompt in range(use.prompts)]
        assert sum(found) < use.prompts * PROMPT, "the device lost nothing"
        use.client.clear(SPACE)
        use.first = use.prompts
        use.store(4)  # DRAM serves on
        assert use.nvme["read_errors"] + use.nvme["mismatches"] > 0
        tally.count("device lost its end (ext4 over a shortened file)")


def test_filesystem_without_fallocate_is_used_like_any_other(
    private_mounts: None, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with skipped_where_impossible():
        mounts.mount_image(disk, tmp_path / "image", 96 << 20, "ext2")
    with used(Serving(disk, **SIZES)) as use:
        use.store(4)
        use.flush()
        use.check_says("ok")
        use.check_durable()


# --- calls that fail


def faulty_serving(disk: Path, faulty: FaultyDisk, **settings: str) -> Serving:
    """The library does not see what io_uring does."""
    serving = Serving(disk, io_engine="pread", **SIZES, **settings)
    serving.environment = faulty.environment()
    return serving


@pytest.fixture
def on_faulty_disk(tmp_path: Path, faulty: FaultyDisk) -> Iterator[Use]:
    with used(faulty_serving(tmp_path, faulty)) as use:
        yield use


def until_struck(faulty: FaultyDisk, before: int) -> None:
    eventually(lambda: faulty.struck > before, "a call has failed")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(errno.EIO, "io_error EIO"), (errno.ENOSPC, "no_space"), (errno.EROFS, "read_only")],
)
def test_failing_writes_make_the_tier_read_only_until_they_work(
    on_faulty_disk: Use, faulty: FaultyDisk, error: int, reason: str
) -> None:
    use = on_faulty_disk
    for _ in range(tally.rounds(1)):
        use.store(2)
        use.flush()
        before = faulty.struck
        faulty.set(write=error)
        use.store(3)
        use.check_says("read_only", reason)
        assert use.client.flush(60).not_admitted > 0
        for prompt in use.durable:
            assert use.load(prompt) == PROMPT
        faulty.heal()
        use.check_recovers()
        use.check_durable()
        use.forget()
        tally.count(f"write to the disk failed ({errno.errorcode[error]})", faulty.struck - before)


def test_failing_flushes_are_never_taken_for_durable(
    on_faulty_disk: Use, faulty: FaultyDisk
) -> None:
    use = on_faulty_disk
    for _ in range(tally.rounds(1)):
        use.store(2)
        use.flush()
        before = faulty.struck
        faulty.set(sync=errno.EIO)
        use.store(2)
        until_struck(faulty, before)
        result = use.client.flush(60)
        assert result.pending + result.not_admitted > 0, "what failed was called durable"
        faulty.heal()
        use.check_recovers()
        use.check_durable()
        use.forget()
        tally.count("flush of the disk failed (EIO)", faulty.struck - before)


def test_failing_reads_are_misses_until_they_work(on_faulty_disk: Use, faulty: FaultyDisk) -> None:
    use = on_faulty_disk
    for _ in range(tally.rounds(1)):
        use.store(4)  # new ones: those of the round before are left alone still
        use.flush()
        use.client.evict(SPACE, 100_000, "dram")
        before = faulty.struck
        faulty.set(read=errno.EIO)
        assert all(use.load(prompt) == 0 for prompt in use.durable)
        assert faulty.struck > before
        faulty.heal()
        # A page that could not be read is left alone for a while, or is gone from the tier; it can
        # be stored again either way, and is never wrong.
        for prompt in use.durable:
            use.load(prompt)
        use.store(1)
        tally.count("read from the disk failed (EIO)", faulty.struck - before)


def test_calls_that_fail_now_and_then_lose_nothing_that_was_reported_durable(
    on_faulty_disk: Use, faulty: FaultyDisk
) -> None:
    use = on_faulty_disk
    for round_number in range(tally.rounds(2)):
        before = faulty.struck
        faulty.set(write=errno.EIO, sync=errno.EIO, every=2 + round_number % 4)
        for _ in range(4):
            use.store(1)
            result = use.client.flush(60)
            if result.pending == result.not_admitted == 0:
                use.durable = list(range(use.first, use.prompts))
        faulty.heal()
        use.check_durable()
        use.check_recovers()
        use.forget()
        tally.count("write or flush failed now and then (EIO)", max(1, faulty.struck - before))


def test_slow_disk_fills_the_queue_and_holds_nobody_up(tmp_path: Path, faulty: FaultyDisk) -> None:
    with used(faulty_serving(tmp_path, faulty, write_queue="1MiB")) as use:
        use.store(1)
        use.flush()
        for _ in range(tally.rounds(1)):
            faulty.set(delay_s=0.5)
            use.store(4)
            assert use.nvme["queued_bytes"] <= 1 << 20
            use.check_says("ok")

            def behind(use: Use = use) -> bool:
                use.store(1)  # all before may have been written meanwhile
                try:
                    result = use.client.flush(0.3)
                except kvw.TransportError:  # its answer may be late by the call's own time too
                    return True
                return result.pending + result.not_admitted > 0

            eventually(behind, "a flush returns before the disk does")
            faulty.heal()
            use.check_recovers()
            use.check_durable()
            use.forget()
            tally.count("disk half a second late at every call")


def test_stop_on_a_slow_disk_keeps_what_was_stored(tmp_path: Path, faulty: FaultyDisk) -> None:
    with used(faulty_serving(tmp_path, faulty, drain_timeout_s="0.1")) as use:
        for _ in range(tally.rounds(1)):
            faulty.set(delay_s=0.5)
            use.store(2)
            use.client.close()
            assert use.serving.stop() == 0
            assert use.serving.events("flushed")
            faulty.heal()
            use.serving.start()
            use.connect()
            for prompt in range(use.first, use.prompts):
                assert use.load(prompt) == PROMPT
            use.check_recovers()
            use.check_durable()
            use.forget()
            tally.count("disk half a second late at every call")


@pytest.mark.parametrize("answered", [False, True], ids=["at once", "after its first answer"])
def test_disk_that_hangs_at_the_start_costs_its_tier_until_the_next_one(
    tmp_path: Path, faulty: FaultyDisk, answered: bool
) -> None:
    """Incident: the daemon waited for it without a bound, and its DRAM tier was as far away."""
    with used(faulty_serving(tmp_path, faulty)) as use:
        for _ in range(tally.rounds(1)):
            use.store(2)
            use.flush()
            use.client.close()
            use.serving.kill()
            faulty.set(**{"core_delay_s" if answered else "delay_s": 1000})
            for answer_s in longer_bounds():
                use.serving.settings["nvme_answer_s"] = str(answer_s)
                use.serving.start()
                use.connect()
                said = f"the disk gave no answer within {answer_s:g} s of the start"
                if not answered or use.nvme["reason"] != said:
                    break
                use.client.close()  # its first answer, which was to come, took too long
                use.serving.kill()
            if answered:
                said = "the disk stopped answering at the start"
            use.check_says("no_answer", said)
            [event] = use.serving.events("nvme_no_answer")
            assert event["level"] == "error"
            for prompt in range(use.first, use.prompts):
                assert use.load(prompt) == PROMPT
            use.store(2)
            use.client.close()
            assert use.serving.stop() == 0
            faulty.heal()
            del use.serving.settings["nvme_answer_s"]
            use.serving.start()
            use.connect()
            use.check_recovers()
            use.check_durable()
            use.forget()
            tally.count("disk that hangs at a start")


def test_disk_that_hangs_beside_a_new_arena_refuses_the_start_and_changes_nothing(
    tmp_path: Path, faulty: FaultyDisk
) -> None:
    with used(faulty_serving(tmp_path, faulty)) as use:
        use.store(1)
        use.flush()
        use.client.close()
        use.serving.kill()
        use.serving.lose_arena()
        faulty.set(delay_s=1000)
        use.serving.settings["nvme_answer_s"] = "0.5"
        with pytest.raises(RefusedError, match="gave no answer"):
            use.serving.start()
        faulty.heal()
        del use.serving.settings["nvme_answer_s"]
        use.serving.start()
        use.connect()
        use.check_durable()


def test_ledger_on_a_disk_that_hangs_costs_the_tier_until_the_next_start(tmp_path: Path) -> None:
    """Incident: only segments were asked before the start, and one without any waited for the
    ledger without a word."""
    faulty = FaultyDisk(tmp_path, tmp_path / "nvme" / "ledger.mdb")
    with used(faulty_serving(tmp_path, faulty)) as use:
        use.store(1)
        use.client.close()
        assert use.serving.stop() == 0
        faulty.set(delay_s=1000)
        use.serving.settings["nvme_answer_s"] = "0.5"
        use.serving.start()
        use.connect()
        use.check_says("no_answer", "the disk gave no answer within 0.5 s of the start")
        assert use.load(0) == PROMPT


def test_ledger_on_a_disk_that_stops_answering_holds_nobody_up_and_catches_up(
    tmp_path: Path,
) -> None:
    """Incident: who opened a new namespace waited for ever, with whatever the ledger locks: calls
    over gRPC, clears, and after a minute the daemon's own loop, so that /healthz failed."""
    faulty = FaultyDisk(tmp_path, tmp_path / "nvme" / "ledger.mdb")
    other = replace(SPACE, model="opened meanwhile")
    nodes = list(range(PROMPT))
    with used(faulty_serving(tmp_path, faulty, nvme_answer_s="1")) as use:
        use.store(2)
        use.flush()
        use.client.clear(SPACE)

        def ledger() -> str:
            return str(use.client.status()["service"]["ledger_health"])

        eventually(lambda: ledger() == "ok", "a busy machine's disk has answered")
        faulty.set(delay_s=1000)
        opened = use.client.open(other)
        assert opened.store(nodes, pages_of(nodes, 0, 0, PAGE_BYTES), timeout_s=60).stored == PROMPT
        assert ledger() == "in_memory"
        assert "has not answered within 1 s" in use.client.status()["service"]["ledger_reason"]
        with pytest.raises(kvw.StorageError, match="has not answered within 1 s") as caught:
            use.client.clear(SPACE)
        assert caught.value.code == "clear_not_durable"
        use.check_says("ok")
        use.store(1)
        with use.serving.connect_remote() as client:
            assert client.open(other).lookup(nodes).pages == PROMPT
        faulty.heal()
        eventually(lambda: ledger() == "ok", "the ledger has what it missed")
        use.client.flush(60)
        use.client.close()
        use.serving.kill()
        use.serving.lose_arena()
        use.serving.start()
        use.connect()
        assert use.client.open(other).lookup(nodes).pages == PROMPT
        assert [use.load(prompt) for prompt in range(3)] == [0, 0, PROMPT]


def test_ledger_on_a_disk_that_stops_answering_keeps_one_call_waiting_and_nobody_else(
    tmp_path: Path,
) -> None:
    """Incident: while one clear waited, so did all calls over gRPC, and who opened what was there
    already."""
    faulty = FaultyDisk(tmp_path, tmp_path / "nvme" / "ledger.mdb")
    other = replace(SPACE, model="cleared meanwhile")
    out = np.zeros((PROMPT, PAGE_BYTES), np.uint8)
    with used(faulty_serving(tmp_path, faulty, nvme_answer_s="3600")) as use:
        use.store(1)
        use.client.open(other)
        faulty.set(delay_s=1000)
        with (
            use.serving.connect(timeout_s=3600) as operator,
            use.serving.connect_remote() as client,
            ThreadPoolExecutor(1) as threads,
        ):
            clearing = threads.submit(operator.clear, other)
            try:
                eventually(
                    lambda: max(each.clear_epoch for each in client.namespaces()),
                    "the clear is under way",
                )
                assert client.open(SPACE).load(use.nodes(0), out) == PROMPT
                assert use.load(0) == PROMPT
                assert not clearing.done()
            finally:
                faulty.heal()
            clearing.result(DEADLINE_S)


def test_start_that_a_disk_keeps_waiting_says_so_and_ends_when_told(tmp_path: Path) -> None:
    """Incident: it waited without a word, and a SIGTERM did not end it."""
    written = tmp_path / "nvme" / "identity.copy"  # after all that is asked before the start
    faulty = FaultyDisk(tmp_path, written)
    with used(faulty_serving(tmp_path, faulty)) as use:
        use.store(1)
        use.client.close()
        assert use.serving.stop() == 0
        written.unlink()  # the start makes it anew
        faulty.set(delay_s=1000)
        for answer_s in longer_bounds():
            use.serving.settings["nvme_answer_s"] = str(answer_s)
            use.serving.launch()
            eventually(lambda: waits(use.serving) or use.serving.events("ready"), "it waits")
            if waits(use.serving):
                break
            assert use.serving.stop() == 0  # what was asked before the start took too long
        assert use.serving.stop() == 128 + signal.SIGTERM
        assert waits(use.serving)[0]["level"] == "warning"
        faulty.heal()
        del use.serving.settings["nvme_answer_s"]
        use.serving.start()
        use.connect()
        assert use.load(0) == PROMPT


def waits(serving: Serving) -> list[dict[str, Any]]:
    """What its log says of waiting for its NVMe tier."""
    nvme = str(serving.nvme_dir)
    return [event for event in serving.events("start_waits") if nvme in event["path"]]


# --- memory that really is full


def test_memory_that_others_filled_costs_no_page_and_is_used_once_it_has_room(
    private_mounts: None, tmp_path: Path
) -> None:
    with skipped_where_impossible():
        mounts.mount_tmpfs(tmp_path / "memory", "44m")
    filler = tmp_path / "memory" / "filler"
    settings = {"arena_dir": str(tmp_path / "memory" / "arena"), "dram": "32MiB"}
    with used(Serving(tmp_path / "disk", **settings)) as use:
        use.store(4)
        eventually(
            lambda: use.client.status()["core"]["tiers"]["dram"]["health"] == "ok", "all is there"
        )
        for _ in range(tally.rounds(1)):
            fill(filler)
            for _ in range(2):  # the second start has nothing but what the first one left
                use.client.close()
                use.serving.kill()
                use.serving.start()
                use.connect()
                for prompt in range(use.prompts):
                    assert use.load(prompt) == PROMPT
            assert use.serving.events("arena_room_short")
            filler.unlink()
            use.store(1)
            tally.count("memory filled up by others, then emptied (tmpfs)")


def test_metadata_that_finds_no_room_is_said_and_costs_no_page_that_is_there(
    private_mounts: None, tmp_path: Path
) -> None:
    """Incident: of eight slabs one was used, and status, log and metrics said that all was well."""
    memory = tmp_path / "memory"
    with skipped_where_impossible():
        mounts.mount_tmpfs(memory, "38m")
    space = kvw.Namespace(  # a slot's metadata has the page's tokens
        model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4096, page_bytes=4096
    )
    serving = Serving(tmp_path / "disk", arena_dir=str(memory / "arena"), dram="32MiB")
    with serving, serving.connect(timeout_s=60) as client:
        ns = client.open(space)

        def dram() -> Any:
            return client.status()["core"]["tiers"]["dram"]

        def store_and_load(prompt: int) -> None:
            nodes = list(range(32))
            tokens = np.repeat(np.array(nodes, np.uint32) + prompt, space.page_tokens)
            pages, out = pages_of(nodes, 0, prompt, 4096), np.zeros((32, 4096), np.uint8)
            assert ns.store(tokens, pages, timeout_s=60).stored == 32
            assert ns.load(tokens, out, timeout_s=60) == 32
            check_pages(out, nodes, 0, prompt)

        for prompt in range(32):
            store_and_load(prompt)
        limited = dram()
        assert "No space left" in limited["health"]
        assert 32 <= limited["pages"] < 32 * 32
        eventually(lambda: serving.events("core"), "the log says it")
        assert [each["name"] for each in serving.events("core")] == ["arena_limited"]
        with skipped_where_impossible():
            mounts.remount(memory, "size=64m")
        prompts = iter(range(32, 100_000))

        # It is well as soon as it has grown, which may be between a store and the next.
        def grown() -> bool:
            store_and_load(next(prompts))
            return dram()["health"] == "ok" and dram()["pages"] > limited["pages"]

        eventually(grown, "the arena has grown to its whole size")
    tally.count("memory filled up by others, then emptied (tmpfs)")

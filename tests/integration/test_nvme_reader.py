"""Loads past the daemon, end to end on a real one: pages are held where they are on NVMe, read by
preadv, verified, and handed over. Whatever is wrong with a page or with the daemon is a miss, or
the daemon's own path."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import core
from kvwarehouse.gpu.file_reader import Finished, HeldFile, PreadReader, read_whole
from kvwarehouse.gpu.nvme_reader import NvmeReader
from kvwarehouse.gpu.staging_area import HostStagingArea
from kvwarehouse_bench.harness.eventually import eventually, longer_bounds
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit.damage import find_one
from testkit.fleet_secrets import secret_file

PAGE_TOKENS = 4
PAGE_BYTES = 20_000  # no multiple of a block: shards are padded
PAGES = 24
SHARDS = 2
SEGMENT = "1MiB"
LOAD_S = 30.0


def space(salt: str = "", page_bytes: int = PAGE_BYTES, shards: int = SHARDS) -> kvw.Namespace:
    return kvw.Namespace(
        model="reader",
        weights="w",
        dtype="uint8",
        layout="test/1",
        page_tokens=PAGE_TOKENS,
        page_bytes=page_bytes,
        shards=shards,
        salt=salt,
    )


def tokens(pages: int = PAGES, chain: int = 0) -> Any:
    return np.arange(pages * PAGE_TOKENS, dtype=np.uint32) + chain * 1_000_000


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    # Small segments: a prompt lies in several, and few stores make reclaim necessary.
    sizes = {"dram": "16MiB", "nvme_capacity": "8MiB"}
    with Serving(tmp_path, fleet_secret=secret_file(tmp_path), **sizes) as serving:
        yield serving


@pytest.fixture
def client(serving: Serving) -> Iterator[kvw.Client]:
    with serving.connect(timeout_s=60) as client:
        yield client


def store(ns: kvw.OpenNamespace, pages: int = PAGES, chain: int = 0) -> None:
    """Page by page, all shards: as ranks do it side by side."""
    for page in range(pages):
        for shard in range(ns.space.shards):
            row = pages_of([chain << 20 | page], shard, 0, ns.space.page_bytes)
            ids = tokens(page + 1, chain)
            assert ns.store(ids, row, shard, first=page, timeout_s=60).stored == 1


def to_nvme(client: kvw.Client, pages: int = PAGES) -> None:
    assert client.flush().pending == 0
    client.evict(None, 100_000, "dram")


def stored_on_nvme(client: kvw.Client, pages: int = PAGES) -> kvw.OpenNamespace:
    ns = client.open(space())
    store(ns, pages)
    to_nvme(client)
    assert ns.lookup(tokens(pages)).by_tier == {"hbm": 0, "dram": 0, "nvme": pages, "remote": 0}
    return ns


def load_and_check(
    ns: kvw.OpenNamespace, reader: NvmeReader, pages: int = PAGES, first: int = 0
) -> kvw.Loaded:
    for shard in range(SHARDS):
        out = np.zeros((pages - first, PAGE_BYTES), np.uint8)
        loaded = reader.load(ns, tokens(pages), out, shard, first=first, timeout_s=30)
        check_pages(out[: int(loaded)], range(first, first + int(loaded)), shard, 0)
    return loaded


class Gate:
    """preadv that waits, for what has to happen in the middle of a read."""

    name = "gate"

    def __init__(self) -> None:
        self._inner = PreadReader()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def start(self, file: HeldFile, offset_bytes: int, target: Any) -> Finished:
        finished = self._inner.start(file, offset_bytes, target)

        def gated(timeout_s: float) -> bool:
            self.entered.set()
            return self.go_on.wait(min(timeout_s, 60)) and finished(timeout_s)

        return gated

    @contextmanager
    def reading(
        self, ns: kvw.OpenNamespace, reader: NvmeReader, out: Any
    ) -> Iterator[list[kvw.Loaded]]:
        """A load that has begun to read, and ends with the block."""
        loads: list[kvw.Loaded] = []
        thread = threading.Thread(
            target=lambda: loads.append(reader.load(ns, tokens(), out, timeout_s=30))
        )
        thread.start()
        try:
            assert self.entered.wait(30)
            yield loads
        finally:
            self.go_on.set()
            thread.join(60)

    def close(self) -> None:
        self._inner.close()


class Changing:
    """preadv whose bytes are changed after they landed."""

    name = "changing"

    def __init__(self, change: Any) -> None:
        self._inner, self._change = PreadReader(), change

    def start(self, file: HeldFile, offset_bytes: int, target: Any) -> Finished:
        finished = self._inner.start(file, offset_bytes, target)

        def changed(timeout_s: float) -> bool:
            if not finished(timeout_s):
                return False
            self._change(target)
            return True

        return changed

    def close(self) -> None:
        self._inner.close()


def promoted(client: kvw.Client) -> int:
    return int(client.status()["core"]["tiers"]["nvme"]["pages_promoted"])


def pins(client: kvw.Client) -> int:
    return int(client.status()["core"]["pins"]["held"])


def test_pages_on_nvme_are_read_past_the_daemon_and_are_what_was_stored(
    client: kvw.Client,
) -> None:
    ns = stored_on_nvme(client)
    with NvmeReader() as reader:
        assert load_and_check(ns, reader) == PAGES
        assert reader.pages_read == SHARDS * PAGES
        assert reader.failures == {}
        assert load_and_check(ns, reader, first=5) == PAGES - 5
    assert promoted(client) == 0


def test_a_prompt_in_both_tiers_is_loaded_from_each(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)
    out = np.zeros((9, PAGE_BYTES), np.uint8)
    assert ns.load(tokens(9), out, timeout_s=30) == 9  # promotes them
    with NvmeReader() as reader:
        assert load_and_check(ns, reader) == PAGES
        assert reader.pages_read == SHARDS * (PAGES - 9)


def test_a_read_larger_than_its_stages_goes_in_rounds(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)
    for stage_bytes in (20_480, 3 * 20_480, 5 * 20_480 + 4096, 1 << 20):
        with NvmeReader(staging=HostStagingArea(stage_bytes)) as reader:
            assert load_and_check(ns, reader) == PAGES
            assert reader.pages_read == SHARDS * PAGES


def test_a_prompt_in_more_segments_than_may_be_held_is_read_hold_by_hold(
    client: kvw.Client,
) -> None:
    ns = stored_on_nvme(client, 3 * PAGES)
    holds = []
    with NvmeReader(Changing(lambda target: holds.append(pins(client)))) as reader:
        assert load_and_check(ns, reader, 3 * PAGES) == 3 * PAGES
        assert reader.pages_read == SHARDS * 3 * PAGES
    assert max(holds) == 2, "a quarter of the tier's segments"


def test_pages_may_lie_scattered_in_the_callers_memory(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)
    memory = np.zeros((PAGES * 2, PAGE_BYTES), np.uint8)
    blocks = np.random.default_rng(1).permutation(PAGES * 2)[:PAGES]
    half = PAGE_BYTES // 2
    base = memory.ctypes.data
    regions = kvw.Regions.strided(
        [memory], [base, base + half], [PAGE_BYTES] * 2, [half] * 2, blocks.reshape(-1, 1)
    )
    with NvmeReader() as reader:
        assert reader.load(ns, tokens(), regions, 1, timeout_s=30) == PAGES
        assert reader.pages_read == PAGES
    check_pages(memory[blocks], range(PAGES), 1, 0)


def test_keys_of_several_prompts_are_read_in_one_call(client: kvw.Client) -> None:
    ns = client.open(space("keys", shards=1))
    runs = [
        kvw.KeyRun([b"a%d" % i for i in range(6)]),
        kvw.KeyRun([b"b%d" % i for i in range(7)]),
    ]
    rows = pages_of(range(13), 0, 0, PAGE_BYTES)
    assert ns.store(keys=runs, pages=rows, timeout_s=60).stored == 13
    to_nvme(client)
    out = np.zeros_like(rows)
    with NvmeReader() as reader:
        assert reader.load(ns, keys=runs, out=out, timeout_s=30) == 13
        assert reader.pages_read == 13
    check_pages(out, range(13), 0, 0)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_flipped_byte_on_disk_is_a_miss_and_the_daemon_takes_the_page_out(
    serving: Serving, client: kvw.Client, shard: int
) -> None:
    ns = stored_on_nvme(client)
    find_one(serving.segments, pages_of([11], shard, 0, PAGE_BYTES)[0]).flip(at=7000)
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with NvmeReader() as reader:
        loaded = reader.load(ns, tokens(), out, shard, timeout_s=30)
        assert loaded == 11
        assert reader.failures
        check_pages(out[:11], range(11), shard, 0)
        assert reader.load(ns, tokens(), out, shard, timeout_s=30) == 11
    assert ns.lookup(tokens()).pages == 11


def test_a_byte_that_changes_on_its_way_is_a_miss_of_that_read_alone(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)

    def change(target: Any) -> None:
        target[-PAGE_BYTES // 2] ^= 1

    with NvmeReader(Changing(change)) as reader:
        # The daemon's own read finds nothing wrong with the record.
        assert load_and_check(ns, reader) == PAGES
        assert reader.failures
        assert reader.pages_read < SHARDS * PAGES


def test_an_error_of_the_file_reader_goes_the_daemons_way(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)

    def fail(target: Any) -> None:
        raise RuntimeError("POSIX error on pread: EOF")

    with NvmeReader(Changing(fail)) as reader:
        assert load_and_check(ns, reader) == PAGES
        assert reader.pages_read == 0
        assert list(reader.failures) == ["POSIX error on pread: EOF"]


def test_segments_are_not_reused_while_they_are_read(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)
    gate = Gate()
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with NvmeReader(gate) as reader:
        with gate.reading(ns, reader, out) as loads:
            assert pins(client) > 0
            # The tier is written over several times; what is held stays.
            for chain in range(1, 30):
                store(ns, PAGES, chain)
                to_nvme(client)
            assert client.status()["core"]["tiers"]["nvme"]["reclaimed_segments"] > 8
            assert pins(client) > 0
        assert reader.failures == {}
        assert reader.pages_read > 0
        check_pages(out[: int(loads[0])], range(int(loads[0])), 0, 0)
    assert pins(client) == 0


def test_a_read_goes_on_when_the_daemon_is_killed_in_the_middle(serving: Serving) -> None:
    gate = Gate()
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with serving.connect() as client:
        ns = stored_on_nvme(client)
        with NvmeReader(gate) as reader:
            with gate.reading(ns, reader, out) as loads:
                serving.kill()
            assert loads == [PAGES]
            check_pages(out, range(PAGES), 0, 0)


def test_a_cleared_page_is_not_handed_over_though_its_bytes_were_read(
    client: kvw.Client,
) -> None:
    ns = stored_on_nvme(client)
    gate = Gate()
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with NvmeReader(gate) as reader, gate.reading(ns, reader, out) as loads:
        client.clear(ns.space)
    assert loads == [0]


def test_no_load_has_pages_of_both_sides_of_a_clear(client: kvw.Client) -> None:
    """Incident: the first pages came past the daemon. Then the namespace was cleared, for new
    weights, and the prompt stored anew; the daemon brought the rest of that."""
    ns = stored_on_nvme(client)
    arrived: list[int] = []

    def change(target: Any) -> None:
        arrived.append(len(target))
        if len(arrived) == 2:  # the first is handed over
            client.clear(ns.space)
            store_anew(ns)

    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with NvmeReader(Changing(change), HostStagingArea(20_480)) as reader:
        loaded = reader.load(ns, tokens(), out, timeout_s=30)
        assert loaded == 0
        assert loaded.missed == {"cleared": PAGES}
        assert reader.pages_read > 0
        assert reader.load(ns, tokens(), out, timeout_s=30) == PAGES
    check_pages(out, [1 << 20 | page for page in range(PAGES)], 0, 0)


def store_anew(ns: kvw.OpenNamespace) -> None:
    """Other bytes for the same prompt."""
    for shard in range(SHARDS):
        rows = pages_of([1 << 20 | page for page in range(PAGES)], shard, 0, PAGE_BYTES)
        assert ns.store(tokens(), rows, shard, timeout_s=60).stored == PAGES


def test_a_load_beside_one_that_reads_goes_the_daemons_way(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)
    gate = Gate()
    out, beside = np.zeros((PAGES, PAGE_BYTES), np.uint8), np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with NvmeReader(gate) as reader:
        with gate.reading(ns, reader, out) as loads:
            assert reader.load(ns, tokens(), beside, timeout_s=30) == PAGES
            assert reader.pages_read == 0
            assert promoted(client) == PAGES
        assert loads == [PAGES]
        assert reader.pages_read == PAGES
    check_pages(beside, range(PAGES), 0, 0)
    check_pages(out, range(PAGES), 0, 0)


class Late:
    """Reads when it is let, and says until then that it has not: the time of whoever waits for it
    is over at once, by the clock that it gives the reader."""

    name = "late"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self._waited_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._waited_s)
        monkeypatch.setattr("kvwarehouse.gpu.nvme_reader.time", clock)

    def start(self, file: HeldFile, offset_bytes: int, target: Any) -> Finished:
        def finished(timeout_s: float) -> bool:
            self.asked.set()
            if timeout_s <= LOAD_S and not self.go_on.is_set():
                self._waited_s += timeout_s
                return False
            if not self.go_on.wait(60):
                return False
            read_whole(file.descriptor, memoryview(target), offset_bytes)
            return True

        return finished

    def close(self) -> None:
        pass


def test_a_disk_that_does_not_answer_holds_nobody_and_its_hold_ends_when_it_has(
    client: kvw.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = stored_on_nvme(client)
    disk = Late(monkeypatch)
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with NvmeReader(disk) as reader:
        late = reader.load(ns, tokens(), out, timeout_s=LOAD_S)
        assert disk.asked.is_set()
        assert late.missed == {"timeout": PAGES}
        assert list(reader.failures) == ["pages were not verified within the load's time"]
        assert reader.failures_in_a_row == 0, "slow is not broken"
        # Its transfers may still write: the segments are held, and others have another way.
        assert pins(client) > 0
        assert reader.load(ns, tokens(), out, timeout_s=30) == PAGES
        assert reader.pages_read == 0
        disk.go_on.set()
        eventually(lambda: pins(client) == 0, "the hold ends with the last transfer")
        assert len(reader.failures) == 1, "what it read from was there to the end"

        def read_past() -> bool:
            """A load before the turn is given back brings the pages into DRAM."""
            client.evict(None, 100_000, "dram")
            assert reader.load(ns, tokens(), out, timeout_s=30) == PAGES
            return reader.pages_read == PAGES

        eventually(read_past, "a turn")
    check_pages(out, range(PAGES), 0, 0)


def test_without_a_thread_to_wait_for_it_a_late_transfer_keeps_what_it_writes_to(
    client: kvw.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoThread:
        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    ns = stored_on_nvme(client)
    disk = Late(monkeypatch)
    reader = NvmeReader(disk)
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with monkeypatch.context() as without:
        without.setattr("kvwarehouse.gpu.nvme_reader.threading.Thread", NoThread)
        without.setattr("kvwarehouse.gpu.nvme_reader._kept", kept := [])
        assert reader.load(ns, tokens(), out, timeout_s=LOAD_S) == 0
        assert kept
        assert pins(client) > 0
        assert reader.load(ns, tokens(), out, timeout_s=30) == PAGES
        assert reader.pages_read == 0


def test_a_page_larger_than_a_stage_goes_the_daemons_way(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)
    with NvmeReader(staging=HostStagingArea(16 << 10)) as reader:
        assert load_and_check(ns, reader) == PAGES
        assert (reader.pages_read, reader.failures) == (0, {})


@pytest.mark.skipif(core.io_engine_probe() != "io_uring", reason="pread cannot read a pipe")
def test_a_segment_that_does_not_answer_is_held_by_nobody_in_time(
    client: kvw.Client, serving: Serving
) -> None:
    ns = stored_on_nvme(client)
    path = min((serving.nvme_dir / "segments").glob("*.seg"))
    aside = path.with_suffix(".aside")
    path.rename(aside)
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    try:
        with NvmeReader() as reader:
            for bound_s in longer_bounds(0.3):
                reader.load(ns, tokens(), out, timeout_s=bound_s)
                assert reader.pages_read == 0
                if pins(client):  # it came to the disk within the bound
                    break
            assert pins(client) > 0, "the read of a header may still come"
    finally:
        os.close(writer)  # the pipe ends, and with it the read
        aside.rename(path)
    eventually(lambda: pins(client) == 0, "the hold ends with its last read")
    with NvmeReader() as reader:
        client.evict(None, 100_000, "dram")
        assert load_and_check(ns, reader) == PAGES
        assert reader.pages_read > 0


def test_what_is_read_again_comes_into_dram(client: kvw.Client) -> None:
    ns = stored_on_nvme(client)
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)

    def load(pages: int, shard: int = 0) -> dict[str, int]:
        assert reader.load(ns, tokens(pages), out, shard, timeout_s=30) == pages
        check_pages(out[:pages], range(pages), shard, 0)
        return dict(ns.lookup(tokens()).by_tier)

    with NvmeReader(promotes=True) as reader:
        assert load(7) == {"hbm": 0, "dram": 0, "nvme": PAGES, "remote": 0}
        assert reader.pages_read == 7
        # Another rank's part of a page is another one's first.
        assert load(7, shard=1) == {"hbm": 0, "dram": 0, "nvme": PAGES, "remote": 0}
        assert reader.pages_read == 14
        # What is new is read past the daemon behind what is not.
        assert load(PAGES) == {"hbm": 0, "dram": 7, "nvme": PAGES - 7, "remote": 0}
        assert reader.pages_read == 14 + PAGES - 7
        assert load(PAGES) == {"hbm": 0, "dram": PAGES, "nvme": 0, "remote": 0}
        assert reader.pages_read == 14 + PAGES - 7
        assert reader.failures == {}


def test_a_daemon_without_nvme_loads_as_ever(tmp_path: Path) -> None:
    with Serving(tmp_path, dram="16MiB") as serving, serving.connect() as client:
        ns = client.open(space())
        store(ns)
        with NvmeReader() as reader:
            assert load_and_check(ns, reader) == PAGES
            assert reader.pages_read == 0


def test_what_is_not_stored_is_missing(client: kvw.Client) -> None:
    ns = stored_on_nvme(client, 7)
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    with NvmeReader() as reader:
        loaded = reader.load(ns, tokens(), out, timeout_s=30)
    assert loaded == 7
    assert loaded.missed == {"missing": PAGES - 7}


def test_remote_clients_have_no_segments(serving: Serving, client: kvw.Client) -> None:
    stored_on_nvme(client)
    with serving.connect_remote() as remote, NvmeReader() as reader:
        ns = remote.open(space())
        out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        with pytest.raises(kvw.UsageError, match="unix"):
            reader.load(ns, tokens(), out, timeout_s=30)

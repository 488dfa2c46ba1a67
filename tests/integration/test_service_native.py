"""gRPC over the real engine: what remote clients store, load, evict and clear, and what a restart
keeps of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvwarehouse import core, wire
from kvwarehouse.daemon import transfer
from kvwarehouse.embedded.private import PrivateDaemon
from kvwarehouse.types import Namespace
from kvwarehouse.wire import status_pb2
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.eventually import eventually, longer_bounds
from testkit.served import Served

T = 60.0
PAGE_BYTES = 300_001
PADDED_BYTES = 303_104  # whole blocks of 4 KiB
RECORD_HEADER_BYTES = 4096  # of a page in a segment, docs/format.md
SPACE = Namespace(
    model="m", weights="w", dtype="b", layout="test/1", page_tokens=16, page_bytes=PAGE_BYTES,
    shards=2,
)  # fmt: skip

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Remote:
    """The calls of a remote client, without its comforts."""

    def __init__(self, socket: str, space: Namespace = SPACE) -> None:
        options = [*wire.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self.stub = wire.WarehouseStub(grpc.insecure_channel(f"unix:{socket}.grpc", options))
        self.space = space
        request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(space), id=space.id)
        self.stub.OpenNamespace(request, timeout=T)

    def store(self, seed: int, pages: int, shard: int, data: Bytes) -> Any:
        def parts() -> Iterator[pb.StoreRequest]:
            header = pb.StoreHeader(
                namespace_id=self.space.id, prefix=prefix(seed, pages), pages=pages, shard=shard
            )
            yield pb.StoreRequest(header=header)
            flat = data.tobytes()
            for start in range(0, len(flat), 700_000):
                yield pb.StoreRequest(data=flat[start : start + 700_000])

        return self.stub.Store(parts(), timeout=T)

    def load(self, seed: int, pages: int, shard: int, first: int = 0) -> tuple[bytes, Any]:
        request = pb.LoadRequest(
            namespace_id=self.space.id, prefix=prefix(seed, pages), shard=shard, first=first,
            timeout_s=T,
        )  # fmt: skip
        answers = list(self.stub.Load(request, timeout=T))
        return b"".join(answer.data for answer in answers), answers[-1].summary

    def pages(self, seed: int, pages: int) -> tuple[int, int]:
        request = pb.LookupRequest(namespace_id=self.space.id, prefix=prefix(seed, pages))
        found = self.stub.Lookup(request, timeout=T)
        assert found.dram_pages + found.nvme_pages == found.pages
        return found.dram_pages, found.nvme_pages


def prefix(seed: int, pages: int) -> pb.Prefix:
    tokens = np.random.default_rng(seed).integers(0, 2**32, pages * 16 + 5, dtype=np.uint32)
    return wire.prefix_to_wire(tokens, None)


def content(seed: int, pages: int, shard: int) -> Bytes:
    rng = np.random.default_rng([seed, shard])
    return rng.integers(0, 256, (pages, PAGE_BYTES), dtype=np.uint8)


def fill(remote: Remote, seed: int, pages: int) -> None:
    for shard in range(2):
        answer = remote.store(seed, pages, shard, content(seed, pages, shard))
        assert answer.stored == pages, answer


def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "nvme").mkdir(mode=0o700, exist_ok=True)
    return {
        "dram": "64MiB",
        "nvme_dir": str(tmp_path / "nvme"),
        "nvme_capacity": "128MiB",
        "flush_interval_s": 0.05,
    }


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """In this process."""
    with Served(tmp_path, engine=core, **settings(tmp_path)) as served:
        yield served


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[PrivateDaemon]:
    """A process, to be restarted."""
    with PrivateDaemon(settings(tmp_path)) as daemon:
        yield daemon


def restart(
    daemon: PrivateDaemon, *, keep_arena: bool = True, damaged: Sequence[Path] = ()
) -> Remote:
    assert daemon.stop() == 0
    if not keep_arena:
        for name in ("arena", "slots", "control"):
            (daemon.arena_dir / name).unlink()
    for file in damaged:
        file.write_bytes(b"damaged")
    daemon.start()
    return Remote(daemon.socket)


def flush(remote: Remote) -> None:
    done = remote.stub.Flush(pb.FlushRequest(timeout_s=T), timeout=T)
    assert (done.pending, done.not_admitted) == (0, 0)


def test_load_returns_what_was_stored_shard_by_shard(served: Served) -> None:
    remote = Remote(served.config.socket)
    fill(remote, 1, 9)
    assert remote.pages(1, 9) == (9, 0)
    for shard in range(2):
        got, summary = remote.load(1, 9, shard)
        assert got == content(1, 9, shard).tobytes()
        assert summary.pages == 9
        got, _ = remote.load(1, 9, shard, first=4)
        assert got == content(1, 9, shard)[4:].tobytes()
    assert remote.load(2, 9, 0)[0] == b""


def test_page_with_a_missing_shard_is_no_page(served: Served) -> None:
    remote = Remote(served.config.socket)
    remote.store(1, 3, 0, content(1, 3, 0))
    assert remote.pages(1, 3) == (0, 0)
    assert remote.load(1, 3, 0)[0] == b""


def test_streams_of_many_clients_do_not_mix(served: Served) -> None:
    failures: list[BaseException] = []
    # Of all clients together no more than may be unfinished: each waits for its own second shard.
    pages = 3

    def client(seed: int) -> None:
        try:
            remote = Remote(served.config.socket)
            for _ in range(3):
                fill_any(remote, seed)
                for shard in range(2):
                    got, summary = remote.load(seed, pages, shard)
                    expected = content(seed, pages, shard)[: summary.pages].tobytes()
                    assert got == expected
        except BaseException as error:  # noqa: BLE001  the thread's edge
            failures.append(error)

    def fill_any(remote: Remote, seed: int) -> None:
        for shard in range(2):
            answer = remote.store(seed, pages, shard, content(seed, pages, shard))
            assert answer.stored + answer.already + sum(answer.dropped.values()) == pages

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(T)
    assert not failures, failures[0]


def test_store_that_waits_for_room_goes_on_when_it_comes(tmp_path: Path, patience: Any) -> None:
    """Pages of one shard are unfinished until the other comes, and there is room for a part of
    them: the store waits for the daemon then, which is no client that stands still."""
    pages = 20
    with Served(tmp_path, engine=core, **settings(tmp_path)) as served:
        remote = Remote(served.config.socket)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(remote.store, 1, pages, 0, content(1, pages, 0))
            # All of its bytes have come before the first slot is reserved.
            eventually(lambda: reserved_slots(remote), "a slot is reserved")
            patience.end()
            assert 0 < reserved_slots(remote) < pages
            assert not first.done()
            second = remote.store(1, pages, 1, content(1, pages, 1))
            assert (first.result(T).stored, second.stored) == (pages, pages)
        assert remote.load(1, pages, 0)[0] == content(1, pages, 0).tobytes()
        # A Status may be among them, whose end gRPC had not told yet when patience ended.
        stalled = [line["method"] for line in served.events("stream_stalled")]
        assert f"/{wire.SERVICE_NAME}/Store" not in stalled


def reserved_slots(remote: Remote) -> int:
    status = remote.stub.Status(pb.StatusRequest(), timeout=T).status
    return int(status.core.tiers.dram.reserved_slots)


def test_status_counts_pages_that_stores_dropped_as_their_callers_were_told(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not how often a store asked for them while it waited for room."""
    remote = Remote(served.config.socket)
    dropped: Counter[str] = Counter()
    for number, bound_s in enumerate(longer_bounds(2.0)):  # for the page that never gets any
        monkeypatch.setattr(transfer, "MAX_WAIT_S", bound_s)
        answer = remote.store(number, 20, 0, content(number, 20, 0))
        assert answer.stored + sum(answer.dropped.values()) == 20
        dropped.update(answer.dropped)
        if dropped["reserve_limit"]:  # it came to ask within the bound
            break
    assert dropped["reserve_limit"] == 1
    status = remote.stub.Status(pb.StatusRequest(), timeout=T).status
    assert dict(status.core.stores.dropped) == dict(dropped)
    scraped = served.get("/metrics")[1].splitlines()
    for reason, pages in dropped.items():
        assert f'kvwarehouse_store_dropped_pages_total{{reason="{reason}"}} {pages}' in scraped


def test_status_counts_pages_that_are_sealed_and_shards_that_are_stored(served: Served) -> None:
    """What stores drop are shards too, and is judged beside these."""
    remote = Remote(served.config.socket)
    fill(remote, 1, 9)
    remote.store(2, 4, 0, content(2, 4, 0))  # of no whole page
    stores = remote.stub.Status(pb.StatusRequest(), timeout=T).status.core.stores
    assert (stores.pages_sealed, stores.shards_stored) == (9, 2 * 9 + 4)
    assert "kvwarehouse_stored_shards_total 22" in served.get("/metrics")[1].splitlines()


def test_restart_keeps_pages_and_a_lost_arena_leaves_those_on_nvme(daemon: PrivateDaemon) -> None:
    remote = Remote(daemon.socket)
    fill(remote, 1, 9)
    flush(remote)
    remote = restart(daemon)
    assert remote.pages(1, 9) == (9, 0)
    assert remote.load(1, 9, 1)[0] == content(1, 9, 1).tobytes()
    remote = restart(daemon, keep_arena=False)
    assert remote.pages(1, 9) == (0, 9)
    assert remote.load(1, 9, 0)[0] == content(1, 9, 0).tobytes()


def test_pages_sealed_before_the_daemon_was_killed_are_served_by_the_next(
    daemon: PrivateDaemon,
) -> None:
    fill(Remote(daemon.socket), 1, 9)
    daemon.kill()
    daemon.start()
    remote = Remote(daemon.socket)
    assert sum(remote.pages(1, 9)) == 9
    for shard in range(2):
        assert remote.load(1, 9, shard)[0] == content(1, 9, shard).tobytes()


def test_evicted_pages_stay_away_from_nvme_after_a_restart(daemon: PrivateDaemon) -> None:
    remote = Remote(daemon.socket)
    fill(remote, 1, 9)
    flush(remote)
    request = pb.EvictRequest(namespace_id=SPACE.id, pages=4, tiers="all")
    answer = remote.stub.Evict(request, timeout=T)
    assert (answer.pages, answer.nvme_pages) == (4, 4)
    assert sum(remote.pages(1, 9)) == 5
    assert sum(restart(daemon, keep_arena=False).pages(1, 9)) == 5


def test_cleared_namespace_stays_empty_and_takes_new_pages(daemon: PrivateDaemon) -> None:
    remote = Remote(daemon.socket)
    fill(remote, 1, 4)
    flush(remote)
    assert remote.stub.Clear(pb.ClearRequest(namespace_id=SPACE.id), timeout=T).pages == 4
    assert remote.pages(1, 4) == (0, 0)
    fill(remote, 2, 3)
    flush(remote)
    for keep_arena in (True, False):
        remote = restart(daemon, keep_arena=keep_arena)
        assert remote.pages(1, 4) == (0, 0)
        assert sum(remote.pages(2, 3)) == 3


@pytest.mark.parametrize("keep_arena", [True, False])
def test_clear_is_not_undone_by_the_loss_of_the_ledger(
    daemon: PrivateDaemon, tmp_path: Path, keep_arena: bool
) -> None:
    """The last clear epoch also stands in a file of its own and in headers, and what a lost clear
    could bring back is dropped; what was stored since need not be."""
    remote = Remote(daemon.socket)
    fill(remote, 1, 4)
    flush(remote)
    remote.stub.Clear(pb.ClearRequest(all=True), timeout=T)
    fill(remote, 2, 3)
    flush(remote)
    ledgers = [folder / "ledger.mdb" for folder in (tmp_path / "nvme", Path(daemon.arena_dir))]
    assert all(ledger.exists() for ledger in ledgers)
    remote = restart(daemon, keep_arena=keep_arena, damaged=ledgers)
    assert remote.pages(1, 4) == (0, 0)
    fresh = content(2, 3, 0)[: sum(remote.pages(2, 3))]
    assert remote.load(2, 3, 0)[0] == fresh.tobytes()


def test_check_reads_the_copies_of_both_tiers_and_pages_are_listed_once(served: Served) -> None:
    remote = Remote(served.config.socket)
    fill(remote, 1, 9)
    flush(remote)
    answers = list(remote.stub.Check(pb.CheckRequest(all=True), timeout=T))
    assert answers[-1].done
    in_dram, in_nvme = 2 * PADDED_BYTES, RECORD_HEADER_BYTES + 2 * PADDED_BYTES
    assert (answers[-1].checked, answers[-1].bytes) == (18, 9 * (in_dram + in_nvme))
    assert not any(answer.bad for answer in answers)
    positions, after = [], 0
    while True:
        request = pb.ListPagesRequest(namespace_id=SPACE.id, after=after, limit=2)
        answer = remote.stub.ListPages(request, timeout=T)
        positions += [page.position for page in answer.pages]
        after = answer.next
        if not after:
            break
    assert sorted(positions) == list(range(9))


def test_hits_and_misses_in_the_scrape_are_the_pages_asked(served: Served) -> None:
    remote = Remote(served.config.socket)
    fill(remote, 1, 5)
    for seed, pages in ((1, 5), (1, 3), (2, 7)):
        remote.pages(seed, pages)
    lines = served.get("/metrics")[1].splitlines()
    asked = sum(
        int(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(("kvwarehouse_lookup_hit_pages_total", "kvwarehouse_lookup_missed"))
    )
    assert asked == 15


def test_every_figure_of_the_core_reaches_status(served: Served) -> None:
    core = served._daemon._core.status()
    assert wire.plain(wire.fill(status_pb2.CoreStatus(), core)) == core

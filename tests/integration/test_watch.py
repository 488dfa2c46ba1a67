"""Watch over real gRPC: a watcher that begins at any time knows what the warehouse has, and one
that does not read is cut off without harm to anybody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import wire
from kvwarehouse.client.endpoint import OPTIONS
from kvwarehouse.daemon.interceptors import WATCHES
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit.async_helpers import stopped

PAGE_BYTES = 4096
PAGE_TOKENS = 4


def space(model: str = "m", **fields: Any) -> kvw.Namespace:
    return kvw.Namespace(
        model=model, weights="w", dtype="f", layout="t/1",
        page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES, **fields,
    )  # fmt: skip


def store(client: kvw.Client, number: int, pages: int, model: str = "m") -> None:
    tokens = np.arange(pages * PAGE_TOKENS, dtype=np.uint32) + number * 100_000
    rows = np.zeros((pages, PAGE_BYTES), np.uint8)
    assert client.open(space(model)).store(tokens, rows, timeout_s=60).stored == pages


class Watcher:
    """Applies a watch on a thread of its own."""

    def __init__(self, client: kvw.Client, wanted: kvw.Namespace | None = None) -> None:
        self.pages: dict[bytes, set[str]] = {}
        self.said: dict[bytes, Any] = {}
        self.problems: list[str] = []
        self.synced = threading.Event()
        self.ended: kvw.WarehouseError | None = None
        self._lock = threading.Lock()
        self._changes = client.watch(wanted)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for message in self._changes:
                with self._lock:
                    for change in message.changes:
                        self._apply(change)
                if message.synced:
                    self.synced.set()
        except kvw.WarehouseError as error:
            self.ended = error

    def _apply(self, change: Any) -> None:
        tiers = set(change.tiers)
        if change.stored:
            if change.position and change.parent not in self.pages:
                self.problems.append(f"{change.key.hex()} came before its parent")
            self.pages.setdefault(change.key, set()).update(tiers)
            self.said[change.key] = change
            return
        if not tiers <= self.pages.get(change.key, set()):
            self.problems.append(f"{change.key.hex()} left what it was not in")
        self.pages[change.key] -= tiers
        if not self.pages[change.key]:
            del self.pages[change.key]

    def agrees(self, client: kvw.Client, *spaces: kvw.Namespace) -> None:
        def equal() -> bool:
            stored = {
                page.key: set(page.tiers) for wanted in spaces for page in client.pages(wanted)
            }
            with self._lock:
                return self.pages == stored

        eventually(equal, "the watcher knows what the warehouse has")
        assert not self.problems, self.problems[:3]

    def join(self) -> kvw.WarehouseError | None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the watch did not end"
        return self.ended


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, nvme_capacity="64MiB") as serving:
        yield serving


def test_watcher_knows_what_is_stored_whenever_it_begins(serving: Serving) -> None:
    with serving.connect() as client:
        early = Watcher(client)
        for number in range(30):
            store(client, number, 6)
        client.flush(timeout_s=30)
        late = Watcher(client, space())
        client.evict(space(), pages=50, tiers="dram")
        client.evict(space(), pages=20, tiers="all")
        for watcher in (early, late):
            watcher.agrees(client, space())
            assert watcher.synced.is_set()
            assert len(watcher.pages) == 160
        client.clear(all=True)
        for watcher in (early, late):
            watcher.agrees(client, space())
            assert not watcher.pages
    for watcher in (early, late):
        watcher.join()


def test_watch_of_a_namespace_is_of_that_alone_and_names_it(serving: Serving) -> None:
    keyed = space("keyed", hash_scheme="engine/1")
    with serving.connect() as client:
        one, both = Watcher(client, client.open(keyed).space), Watcher(client)
        keys = [b"a" * 32, b"b" * 32]
        rows = np.zeros((2, PAGE_BYTES), np.uint8)
        client.open(keyed).store(keys=keys, pages=rows, timeout_s=60)
        store(client, 1, 3)
        both.agrees(client, space(), keyed)
        one.agrees(client, keyed)
        assert {change.engine_key for change in one.said.values()} == set(keys)
        by_tokens = [change for change in both.said.values() if change.tokens]
        assert {change.namespace_id for change in by_tokens} == {space().id}
        first = next(change for change in by_tokens if change.position == 0)
        assert np.frombuffer(first.tokens, "<u4").tolist() == [100_000, 100_001, 100_002, 100_003]
    one.join()
    both.join()


def test_watch_after_a_restart_has_the_tokens_of_pages_that_only_nvme_has(serving: Serving) -> None:
    with serving.connect() as client:
        store(client, 1, 5)
        client.flush(timeout_s=30)
    serving.stop()
    serving.lose_arena()
    serving.start()
    with serving.connect() as client:
        watcher = Watcher(client)
        watcher.agrees(client, space())
        assert all(tiers == {"nvme"} for tiers in watcher.pages.values())
        assert sorted(np.frombuffer(c.tokens, "<u4")[0] for c in watcher.said.values()) == [
            100_000 + PAGE_TOKENS * at for at in range(5)
        ]
    watcher.join()


def test_watch_ends_with_the_daemon_and_says_so(serving: Serving) -> None:
    with serving.connect() as client:
        watcher = Watcher(client)
        assert watcher.synced.wait(30)
        assert serving.stop() == 0
        ended = watcher.join()
        assert isinstance(ended, kvw.TransportError)
        assert ended.code == "stopping"  # rather than cut off when the grace of calls is over
        assert ended.retryable


def test_watcher_that_does_not_read_is_cut_off_and_stores_go_on(serving: Serving) -> None:
    """Its feed holds 16 MiB: pages of 4,096 tokens fill that with a thousand changes."""
    wide = kvw.Namespace(
        model="wide", weights="w", dtype="f", layout="t/1", page_tokens=4096, page_bytes=64
    )
    with serving.connect() as client, grpc.insecure_channel(f"unix:{serving.socket}.grpc") as wire_:
        opened = client.open(wide)
        call = wire.WarehouseStub(wire_).Watch(pb.WatchRequest())  # type: ignore[no-untyped-call]
        assert next(call).synced
        tokens = np.arange(40 * 4096, dtype=np.uint32)
        for number in range(100):
            rows = np.zeros((40, 64), np.uint8)
            stored = opened.store(tokens + number * 1_000_000, rows, timeout_s=60)
            assert stored.dropped_pages == 0
        with pytest.raises(grpc.RpcError) as ended:
            for _ in call:
                pass
        error = wire.error_from_rpc(ended.value, address="test")
        assert isinstance(error, kvw.CapacityError)
        assert error.code == "watcher_too_slow"
        again = Watcher(client, wide)
        again.agrees(client, wide)
    again.join()


def test_watchers_are_bounded_and_one_that_ends_makes_room(serving: Serving) -> None:
    with serving.connect() as client:
        watches = [client.watch() for _ in range(WATCHES)]
        for watch in watches:
            assert next(watch).synced
        with pytest.raises(kvw.CapacityError) as refused:
            next(client.watch())
        assert refused.value.code == "too_many_watchers"
        watches[0].close()  # type: ignore[attr-defined]

        def begins() -> bool:
            try:
                return next(client.watch()).synced
            except kvw.CapacityError:
                return False

        eventually(begins, "there is room for another")
        store(client, 1, 1)


def test_watch_of_an_unknown_namespace_is_refused(serving: Serving) -> None:
    with serving.connect() as client, pytest.raises(kvw.UsageError) as refused:
        next(client.watch(space("nobody opened this")))
    assert refused.value.code == "namespace_unknown"


def test_watch_ends_when_its_daemon_is_not_heard_any_more(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch has a day, and hung that long where the daemon's host had vanished."""
    pings = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    sooner = [(name, int(value) // 5 if name in pings else value) for name, value in OPTIONS]

    async def ended() -> kvw.TransportError:
        async with await kvw.aio.connect(serving.address) as client:
            watch = client.watch()
            await anext(watch)
            with stopped(serving), pytest.raises(kvw.TransportError) as caught:
                async for _ in watch:
                    pass
        return caught.value

    for module in ("client", "aio"):
        monkeypatch.setattr(f"kvwarehouse.{module}.rpc.OPTIONS", sooner)
    with kvw.connect(serving.address) as client:
        watch = client.watch()
        next(watch)
        with stopped(serving), pytest.raises(kvw.TransportError) as caught:
            list(watch)
    assert caught.value.code == "unavailable"
    assert asyncio.run(ended()).code == "unavailable"

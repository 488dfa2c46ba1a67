"""Stores and loads over gRPC: a real server on a real socket, over a model of the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvwarehouse import errors, wire
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.daemon.service import WarehouseService
from kvwarehouse.types import Namespace
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.eventually import eventually
from testkit.served import Served

PAGE_BYTES = 3 * (1 << 20) + 5  # not a whole number of chunks
SPACE = Namespace(
    model="m", weights="w", dtype="b", layout="test/1", page_tokens=4, page_bytes=PAGE_BYTES,
    shards=2,
)  # fmt: skip
SMALL = Namespace(
    model="small", weights="w", dtype="b", layout="test/1", page_tokens=4, page_bytes=100
)
TIMEOUT_S = 30.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, streams=2, staging="40MiB") as served:
        yield served


def opened(served: Served, space: Namespace = SPACE) -> bytes:
    request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(space), id=space.id)
    answer = served.stub.OpenNamespace(request, timeout=TIMEOUT_S)
    assert answer.namespace.id == space.id
    return space.id


def prefix(pages: int) -> pb.Prefix:
    return wire.prefix_to_wire(np.arange(pages * 4 + 3), None)


def content(pages: int, page_bytes: int = PAGE_BYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(pages).integers(0, 256, (pages, page_bytes), dtype=np.uint8)


def messages(header: pb.StoreHeader, data: bytes, step: int) -> Iterator[pb.StoreRequest]:
    yield pb.StoreRequest(header=header)
    for start in range(0, len(data), step):
        yield pb.StoreRequest(data=data[start : start + step])


def store(served: Served, data: bytes, step: int = wire.CHUNK_BYTES, **header: Any) -> Any:
    given = {"namespace_id": SPACE.id, "prefix": prefix(7), **header}
    return served.stub.Store(messages(pb.StoreHeader(**given), data, step), timeout=TIMEOUT_S)


def load(served: Served, **request: Any) -> tuple[bytes, Any]:
    given = {"namespace_id": SPACE.id, "prefix": prefix(7), **request}
    answers = list(served.stub.Load(pb.LoadRequest(**given), timeout=TIMEOUT_S))
    assert all(len(answer.data) <= wire.CHUNK_BYTES for answer in answers)
    assert [answer.WhichOneof("part") for answer in answers[:-1]] == ["data"] * (len(answers) - 1)
    return b"".join(answer.data for answer in answers), answers[-1].summary


def refused(call: Any) -> errors.WarehouseError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return wire.error_from_rpc(caught.value, address="test")


@pytest.mark.parametrize("step", [1 << 20, 999_983, 70_001])
def test_load_returns_the_bytes_that_were_stored_however_they_were_cut(
    served: Served, step: int
) -> None:
    opened(served)
    for shard in range(2):
        data = content(7)[:, ::-1] if shard else content(7)
        answer = store(served, data.tobytes(), step, pages=7, shard=shard)
        assert (answer.stored, answer.already, dict(answer.dropped)) == (7, 0, {})
        got, summary = load(served, shard=shard)
        assert got == data.tobytes()
        assert (summary.pages, dict(summary.missed)) == (7, {})


def test_load_returns_the_window_that_was_asked_for(served: Served) -> None:
    opened(served)
    data = content(7)
    store(served, data.tobytes(), pages=7)
    got, summary = load(served, first=2, pages=3)
    assert got == data[2:5].tobytes()
    assert summary.pages == 3


def test_store_of_a_later_part_continues_the_prefix(served: Served) -> None:
    opened(served)
    data = content(7)
    store(served, data[:4].tobytes(), pages=4)
    assert store(served, data[2:].tobytes(), first=2, pages=5).already == 2
    assert load(served)[0] == data.tobytes()


def test_load_says_why_it_ends_before_the_prefix_does(served: Served) -> None:
    opened(served)
    data = content(7)
    store(served, data[:3].tobytes(), pages=3)
    got, summary = load(served)
    assert got == data[:3].tobytes()
    assert summary.pages == 3
    assert sum(summary.missed.values()) == 4


def clear_and_store_anew(served: Served, pages: int) -> bytes:
    """As an engine does that has other weights: what it stored."""
    served.stub.Clear(pb.ClearRequest(namespace_id=SPACE.id), timeout=TIMEOUT_S)
    new = content(pages)[:, ::-1].tobytes()
    assert store(served, new, prefix=prefix(pages), pages=pages).stored == pages
    return new


def test_load_over_a_clear_returns_pages_of_before_alone(served: Served) -> None:
    """A slow client was given 16 pages of one weight, and behind them 32 of another, as a hit."""
    opened(served)
    old = content(13).tobytes()  # three batches
    store(served, old, prefix=prefix(13), pages=13)
    request = pb.LoadRequest(namespace_id=SPACE.id, prefix=prefix(13))
    answers = served.stub.Load(request, timeout=TIMEOUT_S)
    got = next(answers).data
    new = clear_and_store_anew(served, 13)
    *rest, last = answers
    got += b"".join(answer.data for answer in rest)
    assert len(got) == last.summary.pages * PAGE_BYTES
    assert got == old[: len(got)]
    assert 0 < last.summary.pages < 13
    assert dict(last.summary.missed) == {"cleared": 13 - last.summary.pages}
    assert load(served, prefix=prefix(13))[0] == new


def test_store_over_a_clear_stores_nothing_after_it(served: Served) -> None:
    """The end of a slow upload was hung below pages of other weights, and served behind them."""
    opened(served)
    cleared = threading.Event()

    def slow() -> Iterator[pb.StoreRequest]:
        header = pb.StoreHeader(namespace_id=SPACE.id, prefix=prefix(13), pages=13)
        for number, message in enumerate(messages(header, content(13).tobytes(), 1 << 20)):
            if number == 20:  # the first of three batches is whole
                assert cleared.wait(TIMEOUT_S)
            yield message

    upload = served.stub.Store.future(slow(), timeout=TIMEOUT_S)
    eventually(lambda: len(served.core.slots) == 5, "the first batch is stored")
    new = clear_and_store_anew(served, 5)
    cleared.set()
    answer = upload.result()
    assert answer.stored == 5
    assert dict(answer.dropped) == {"cleared": 2, "refused_tail": 6}
    assert load(served, prefix=prefix(13))[0] == new


def test_small_pages_travel_together(served: Served) -> None:
    opened(served, SMALL)
    data = content(3000, 100)
    tokens = wire.prefix_to_wire(np.arange(12000), None)
    answer = store(served, data.tobytes(), namespace_id=SMALL.id, prefix=tokens, pages=3000)
    assert answer.stored == 3000
    got, _ = load(served, namespace_id=SMALL.id, prefix=tokens)
    assert got == data.tobytes()


def test_pages_may_be_named_by_engine_keys(served: Served) -> None:
    opened(served, SMALL)
    keys = wire.prefix_to_wire(None, [b"one", b"two"])
    data = content(2, 100)
    store(served, data.tobytes(), namespace_id=SMALL.id, prefix=keys, pages=2)
    assert load(served, namespace_id=SMALL.id, prefix=keys)[0] == data.tobytes()


def test_lookup_counts_complete_pages_only(served: Served) -> None:
    opened(served)
    data = content(7).tobytes()
    store(served, data, pages=7, shard=0)
    request = pb.LookupRequest(namespace_id=SPACE.id, prefix=prefix(9))
    assert served.stub.Lookup(request, timeout=TIMEOUT_S).pages == 0
    store(served, data, pages=7, shard=1)
    found = served.stub.Lookup(request, timeout=TIMEOUT_S)
    assert (found.pages, found.tokens, found.dram_pages, found.nvme_pages) == (7, 28, 7, 0)


def test_empty_store_and_load_are_values(served: Served) -> None:
    opened(served)
    assert store(served, b"", pages=0).stored == 0
    got, summary = load(served, prefix=prefix(0))
    assert (got, summary.pages) == (b"", 0)


def test_stores_after_a_drain_are_dropped_by_that_reason(served: Served) -> None:
    opened(served)
    served.stub.Drain(pb.DrainRequest(), timeout=TIMEOUT_S)
    assert dict(store(served, content(7).tobytes(), pages=7).dropped) == {"draining": 7}


@pytest.mark.parametrize(
    ("header", "size", "code"),
    [
        ({"pages": 7}, 7 * PAGE_BYTES - 1, "wrong_size"),
        ({"pages": 7}, 7 * PAGE_BYTES + 1, "wrong_size"),
        ({"pages": 8}, 8 * PAGE_BYTES, "bad_range"),
        ({"pages": 2, "first": 6}, 2 * PAGE_BYTES, "bad_range"),
        ({"pages": 1, "shard": 2}, PAGE_BYTES, "bad_shard"),
        ({"pages": 1, "namespace_id": b"x" * 16}, PAGE_BYTES, "namespace_unknown"),
        ({"pages": 1, "namespace_id": b""}, PAGE_BYTES, "namespace_unknown"),
        ({"pages": 1, "prefix": pb.Prefix()}, PAGE_BYTES, "no_prefix"),
        ({"pages": 1, "prefix": pb.Prefix(tokens=b"12345")}, PAGE_BYTES, "bad_tokens"),
    ],
)
def test_bad_store_is_refused_by_its_code(
    served: Served, header: dict[str, Any], size: int, code: str
) -> None:
    opened(served)
    error = refused(lambda: store(served, bytes(size), **header))
    assert error.code == code
    assert isinstance(error, errors.UsageError)
    assert served.engine.core is not None
    opened(served)  # the daemon is up


def test_store_that_does_not_follow_the_protocol_is_refused(served: Served) -> None:
    opened(served)
    header = pb.StoreRequest(
        header=pb.StoreHeader(namespace_id=SPACE.id, prefix=prefix(7), pages=7)
    )
    data = pb.StoreRequest(data=bytes(wire.CHUNK_BYTES))
    large = pb.StoreRequest(data=bytes(wire.CHUNK_BYTES + 1))
    for parts, code in (
        ([], "no_header"),
        ([data], "no_header"),
        ([header, header], "second_header"),
        ([header, pb.StoreRequest()], "second_header"),
        ([header, large], "chunk_too_large"),
    ):
        error = refused(lambda parts=parts: served.stub.Store(iter(parts), timeout=TIMEOUT_S))
        assert error.code == code


def test_daemon_that_does_not_know_clear_epochs_is_told_by_its_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To an older daemon the first message has no part that it knows."""
    as_now = WarehouseService.Store

    def older(self: Any, requests: Any, context: Any) -> pb.StoreResponse:
        first = next(requests)
        known = pb.StoreRequest() if first.WhichOneof("part") == "since" else first
        return as_now(self, chain([known], requests), context)

    monkeypatch.setattr(WarehouseService, "Store", older)
    with (
        Served(tmp_path) as served,
        connect_grpc(f"unix://{served.config.socket}") as client,
    ):
        ns, tokens, pages = client.open(SMALL), range(28), content(7, SMALL.page_bytes)
        with pytest.raises(errors.UsageError, match="older than this client") as caught:
            ns.store(tokens, pages, since_epoch=0)
        assert caught.value.code == "since_unknown"
        assert ns.lookup(tokens).pages == 0
        assert ns.store(tokens, pages).stored == 7


def test_page_larger_than_the_staging_memory_is_refused_by_name(served: Served) -> None:
    large = Namespace(
        model="l", weights="w", dtype="b", layout="l/1", page_tokens=4, page_bytes=48 << 20
    )
    opened(served, large)
    error = refused(lambda: store(served, b"", namespace_id=large.id, pages=7))
    assert error.code == "page_too_large"


def test_streams_beyond_the_bound_are_refused_for_now_and_then_served(served: Served) -> None:
    opened(served)
    served.engine.unblock_loads.clear()
    request = pb.LoadRequest(namespace_id=SPACE.id, prefix=prefix(7))
    held = []
    for _ in range(2):
        served.engine.loads_blocked.clear()
        held.append(served.stub.Load(request, timeout=TIMEOUT_S))
        assert served.engine.loads_blocked.wait(TIMEOUT_S)
    error = refused(lambda: load(served))
    assert isinstance(error, errors.CapacityError)
    assert error.retryable
    served.engine.unblock_loads.set()
    for answers in held:
        list(answers)
    load(served)


def test_broken_core_is_an_error_of_its_class_and_the_daemon_stays(served: Served) -> None:
    opened(served)
    served.core.fail = errors.StorageError("the disk is gone; replace it", code="io_error")
    error = refused(lambda: served.stub.Flush(pb.FlushRequest(), timeout=TIMEOUT_S))
    assert (type(error), error.code) == (errors.StorageError, "io_error")
    served.core.fail = RuntimeError("a bug")  # type: ignore[assignment]
    error = refused(lambda: served.stub.Flush(pb.FlushRequest(), timeout=TIMEOUT_S))
    assert isinstance(error, errors.InternalError)
    assert "a bug" in served.events("rpc_failed")[0]["trace"]
    served.core.fail = None
    served.stub.Flush(pb.FlushRequest(), timeout=TIMEOUT_S)

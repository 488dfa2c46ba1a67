"""Administration over gRPC: a real server on a real socket, over a model of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import lmdb
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvwarehouse import errors, wire
from kvwarehouse.aio.connect import connect_grpc as aio_connect_grpc
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.daemon import ledger, ledger_file
from kvwarehouse.types import Namespace
from kvwarehouse.wire import warehouse_pb2 as pb
from testkit.served import Served

T = 30.0


def space(model: str = "m", page_bytes: int = 8) -> Namespace:
    return Namespace(
        model=model, weights="w", dtype="b", layout="l/1", page_tokens=1, page_bytes=page_bytes
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as served:
        yield served


def opened(served: Served, model: str = "m", pages: int = 0) -> bytes:
    """Opens a namespace and stores `pages` pages in it."""
    namespace = space(model)
    request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(namespace))
    served.stub.OpenNamespace(request, timeout=T)
    if pages:
        prefix = wire.prefix_to_wire(np.arange(pages), None)
        header = pb.StoreHeader(namespace_id=namespace.id, prefix=prefix, pages=pages)
        parts = [pb.StoreRequest(header=header), pb.StoreRequest(data=bytes(8 * pages))]
        served.stub.Store(iter(parts), timeout=T)
    return namespace.id


def fill_disk_of_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise lmdb.DiskError("No space left on device")

    monkeypatch.setattr(ledger_file.LedgerFile, "commit", refuse)


def refused(call: Any) -> errors.WarehouseError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return wire.error_from_rpc(caught.value, address="test")


def test_namespace_keeps_its_number_over_opens_and_restarts(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        for model in ("a", "b", "a"):
            opened(served, model)
        listed = served.stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=T).namespaces
        assert [(n.ordinal, n.fields.model) for n in listed] == [(0, "a"), (1, "b")]
    with Served(tmp_path) as served:
        assert sorted(served.core.spaces) == [0, 1]
        assert opened(served, "c")
        assert served.core.spaces[2][0] == space("c").id


def test_namespaces_are_listed_in_as_many_messages_as_they_need(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [f"{number}" * (300 if number == 3 else 1) for number in range(9)]
    for model in models:
        opened(served, model)
    monkeypatch.setattr(wire, "MAX_LIST_BYTES", 250)  # two or three
    listed: list[str] = []
    after = messages = 0
    while messages == 0 or after:
        answer = served.stub.ListNamespaces(pb.ListNamespacesRequest(after=after), timeout=T)
        listed += [each.fields.model for each in answer.namespaces]
        assert len(answer.namespaces) == 1 or answer.ByteSize() < 300
        after, messages = answer.next, messages + 1
    assert listed == models
    assert messages > 3
    beyond = served.stub.ListNamespaces(pb.ListNamespacesRequest(after=100), timeout=T)
    assert (len(beyond.namespaces), beyond.next) == (0, 0)
    address = f"unix://{served.config.socket}"
    with connect_grpc(address) as client:
        assert [each.fields["model"] for each in client.namespaces()] == models

    async def names() -> list[str]:
        async with await aio_connect_grpc(address) as client:
            return [each.fields["model"] for each in await client.namespaces()]

    assert asyncio.run(names()) == models


def test_namespaces_up_to_their_bounds_are_listed_message_by_message() -> None:
    framing = 16  # tag and length of each
    assert wire.MAX_LIST_BYTES + 4096 * framing < wire.MAX_MESSAGE_BYTES


def test_namespace_of_too_many_bytes_is_refused(served: Served) -> None:
    """Incident: namespaces of half a megabyte each filled the ledger."""
    wide = Namespace.from_fields(
        {**space().to_fields(), "extra": {f"{place}": "x" * 1000 for place in range(9)}}
    )
    request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(wide))
    error = refused(lambda: served.stub.OpenNamespace(request, timeout=T))
    assert isinstance(error, errors.UsageError)
    assert error.code == "namespace_too_large"
    assert not served.core.spaces


def test_namespace_whose_id_the_client_computes_otherwise_is_refused(served: Served) -> None:
    request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(space()), id=bytes(16))
    error = refused(lambda: served.stub.OpenNamespace(request, timeout=T))
    assert error.code == "namespace_id_differs"


def test_namespace_that_fits_no_slab_takes_no_number(served: Served) -> None:
    request = pb.OpenNamespaceRequest(namespace=wire.namespace_to_wire(space("x", 1 << 30)))
    for _ in range(2):
        error = refused(lambda: served.stub.OpenNamespace(request, timeout=T))
        assert error.code == "page_too_large"
    assert not served.stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=T).namespaces


def test_namespace_that_no_longer_fits_does_not_keep_the_daemon_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart with less DRAM: what no longer fits is out of reach, everything else is served."""
    from testkit import fake_engine

    with Served(tmp_path) as served:
        opened(served, "a")
    with monkeypatch.context() as patch:
        patch.setattr(fake_engine, "SLAB_BYTES", 4)
        with Served(tmp_path) as served:
            assert refused(lambda: opened(served, "a")).code == "page_too_large"
            served.stub.Clear(pb.ClearRequest(all=True), timeout=T)
            assert len(served.events("namespace_unusable")) == 1
    with Served(tmp_path) as served:
        opened(served, "a")


def test_clear_is_in_the_ledger_before_it_is_in_the_core(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        first, _ = opened(served, "a", pages=3), opened(served, "b", pages=2)
        served.core.fail = errors.InternalError("dies in the middle of a clear")
        refused(lambda: served.stub.Clear(pb.ClearRequest(namespace_id=first), timeout=T))
        served.core.fail = None
    with Served(tmp_path) as served:
        listed = served.stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=T).namespaces
        assert [n.clear_epoch for n in listed] == [1, 0]
        assert served.core.options.epoch == 1


def test_clear_names_its_target_or_is_refused(served: Served) -> None:
    first = opened(served, "a", pages=3)
    opened(served, "b", pages=2)
    for request in (pb.ClearRequest(), pb.ClearRequest(all=False)):
        call = lambda request=request: served.stub.Clear(request, timeout=T)  # noqa: E731
        assert refused(call).code == "no_target"
    answer = served.stub.Clear(pb.ClearRequest(namespace_id=first), timeout=T)
    assert (answer.pages, answer.epoch) == (3, 1)
    answer = served.stub.Clear(pb.ClearRequest(all=True), timeout=T)
    assert (answer.pages, answer.epoch) == (2, 2)
    assert served.core.clears == [(0, 1), (0, 2), (1, 2)]
    assert [event["namespace"] for event in served.events("cleared")] == [first.hex(), "all"]


def test_namespace_whose_pages_no_longer_fit_can_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from testkit import fake_engine

    with Served(tmp_path) as served:
        first = opened(served, "a")
    with monkeypatch.context() as patch:
        patch.setattr(fake_engine, "SLAB_BYTES", 4)
        with Served(tmp_path) as served:
            request = pb.ClearRequest(namespace_id=first, forget=True)
            served.stub.Clear(request, timeout=T)
            assert refused(lambda: served.stub.Clear(request, timeout=T)).code == (
                "namespace_unknown"
            )
    with Served(tmp_path) as served:
        assert not served.core.spaces
        assert served.core.options.epoch_floor == 2


def test_forgetting_that_the_ledger_cannot_keep_is_done_and_caught_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(tmp_path) as served, monkeypatch.context() as patch:
        patch.setattr(ledger, "MAX_NAMESPACES", 1)
        opened(served, "a")
        with monkeypatch.context() as disk:
            fill_disk_of_ledger(disk)
            opened(served, "b")
        opened(served, "c")
    with Served(tmp_path) as served:
        assert [each[0] for each in served.core.spaces.values()] == [space("c").id]


def test_clear_that_the_ledger_cannot_keep_is_done_and_said(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(served, "a", pages=3)

    fill_disk_of_ledger(monkeypatch)
    error = refused(lambda: served.stub.Clear(pb.ClearRequest(all=True), timeout=T))
    assert error.code == "clear_not_durable"
    assert not served.core.slots
    status = served.stub.Status(pb.StatusRequest(), timeout=T).status
    assert status.service.ledger_health == "in_memory"


def test_eviction_that_the_ledger_cannot_keep_is_done_and_said(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(served, "a", pages=3)

    fill_disk_of_ledger(monkeypatch)
    request = pb.EvictRequest(all=True, pages=3, tiers="all")
    error = refused(lambda: served.stub.Evict(request, timeout=T))
    assert error.code == "evict_not_durable"
    assert "the 3 of them" in error.message
    assert not served.core.slots


def test_evicted_pages_stay_away_over_a_restart(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        first = opened(served, "a", pages=5)
        request = pb.EvictRequest(namespace_id=first, pages=2, tiers="all")
        answer = served.stub.Evict(request, timeout=T)
        assert (answer.pages, answer.nvme_pages) == (2, 2)
        answer = served.stub.Evict(pb.EvictRequest(all=True, pages=1), timeout=T)
        assert [event["namespace"] for event in served.events("evicted")] == [first.hex(), "all"]
        assert (answer.pages, answer.nvme_pages) == (1, 0)
        assert served.stub.Status(pb.StatusRequest()).status.service.ledger_tombstones == 2
    with Served(tmp_path) as served:
        assert list(served.core.tombstones.values()) == [7, 7]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.EvictRequest(all=True), "bad_count"),
        (pb.EvictRequest(all=True, pages=10**6), "bad_count"),
        (pb.EvictRequest(all=True, pages=1, tiers="hbm"), "bad_tiers"),
        (pb.EvictRequest(pages=1), "no_target"),
        (pb.EvictRequest(namespace_id=b"x", pages=1), "namespace_unknown"),
    ],
)
def test_bad_evict_is_refused_by_its_code(
    served: Served, request_: pb.EvictRequest, code: str
) -> None:
    assert refused(lambda: served.stub.Evict(request_, timeout=T)).code == code


def test_pages_are_listed_in_bounded_parts(served: Served) -> None:
    first = opened(served, pages=7)
    after, ids = 0, []
    while True:
        request = pb.ListPagesRequest(namespace_id=first, after=after, limit=3)
        answer = served.stub.ListPages(request, timeout=T)
        ids += [page.id for page in answer.pages]
        assert len(answer.pages) <= 3
        if not answer.next:
            break
        after = answer.next
    assert ids == list(range(7))
    request = pb.ListPagesRequest(namespace_id=first, limit=1001)
    assert refused(lambda: served.stub.ListPages(request, timeout=T)).code == "limit_too_large"


def test_check_reports_progress_and_ends_with_done(served: Served) -> None:
    opened(served, pages=3)
    answers = list(served.stub.Check(pb.CheckRequest(all=True, repair=True), timeout=T))
    assert answers[-1].done
    assert (answers[-1].checked, answers[-1].quarantined) == (3, 1)
    assert [bad.reason for bad in answers[0].bad] == ["digest"]


def test_flush_and_sweep_answer_in_pages(served: Served) -> None:
    opened(served, pages=3)
    assert served.stub.Flush(pb.FlushRequest(timeout_s=1), timeout=T).flushed == 3
    assert served.stub.Sweep(pb.SweepRequest(), timeout=T).pages == 0


def test_drain_turns_health_and_readiness_and_keeps_loads(served: Served) -> None:
    first = opened(served, pages=3)
    health = health_pb2_grpc.HealthStub(served.channel)
    states = health_pb2.HealthCheckResponse
    for service in ("", wire.SERVICE_NAME):
        request = health_pb2.HealthCheckRequest(service=service)
        assert health.Check(request, timeout=T).status == states.SERVING
    listed = health.List(health_pb2.HealthListRequest(), timeout=T).statuses
    assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
        ("", wire.SERVICE_NAME), states.SERVING
    )
    watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=T)
    assert next(watched).status == states.SERVING
    assert served.get("/readyz")[0] == 200
    assert served.stub.Drain(pb.DrainRequest(), timeout=T).flush.flushed == 3
    assert next(watched).status == states.NOT_SERVING
    watched.cancel()
    assert served.get("/readyz") == (503, "draining\n")
    assert served.get("/healthz")[0] == 200
    prefix = wire.prefix_to_wire(np.arange(3), None)
    answers = list(served.stub.Load(pb.LoadRequest(namespace_id=first, prefix=prefix), timeout=T))
    assert answers[-1].summary.pages == 3


def test_drain_is_taken_back_and_both_say_who_asked(served: Served) -> None:
    """Incident: whoever had a token could keep a daemon from stores for good."""
    address = f"unix://{served.config.socket}"

    async def undrain() -> bool:
        async with await aio_connect_grpc(address) as client:
            return await client.undrain()

    health = health_pb2_grpc.HealthStub(served.channel)
    with connect_grpc(address) as client:
        assert not client.undrain()
        for take_back in (client.undrain, lambda: asyncio.run(undrain())):
            client.drain()
            assert served.core.draining
            assert served.get("/readyz") == (503, "draining\n")
            assert take_back()
            assert not client.undrain()
            assert not served.core.draining
            assert served.get("/readyz")[0] == 200
    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=T)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for name in ("draining", "undrained"):
        assert [(line["why"], line["who"]) for line in served.events(name)] == [
            ("asked", "unix:")
        ] * 2


def test_status_is_the_snapshot_that_metrics_show(served: Served) -> None:
    opened(served, pages=3)
    status = served.stub.Status(pb.StatusRequest(), timeout=T).status
    assert (status.state, status.core.index.pages) == ("serving", 3)
    code, text = served.get("/metrics")
    assert code == 200
    assert "kvwarehouse_index_pages 3" in text
    assert f'warehouse_id="{status.core.warehouse_id}"' in text
    assert 'kvwarehouse_load_failed_pages_total{reason="other"} 2' in text


def test_metrics_of_a_core_that_does_not_answer_are_refused_and_not_zero(served: Served) -> None:
    served.core.fail = errors.TransportError("the core thread did not answer in 10 s")
    code, text = served.get("/metrics")
    assert (code, "10 s" in text) == (503, True)
    served.core.fail = None
    assert served.get("/metrics")[0] == 200


def test_http_has_three_paths(served: Served) -> None:
    assert served.get("/healthz")[0] == 200
    assert served.get("/healthz?why")[0] == 200
    assert served.get("/")[0] == 404
    assert served.get("/../../etc/passwd")[0] == 404


def test_reflection_lists_the_standard_services(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([ask]), timeout=T)))
    names = {service.name for service in answer.list_services_response.service}
    assert {wire.SERVICE_NAME, "grpc.health.v1.Health"} <= names

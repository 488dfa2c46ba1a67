"""The wire contract: the one table of errors, conversions, bounds."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from kvwarehouse import errors, wire
from kvwarehouse.types import Namespace
from kvwarehouse.wire import namespace_pb2, status_pb2
from kvwarehouse.wire import warehouse_pb2 as pb

SPACE = Namespace(
    model="m", weights="w", dtype="bfloat16", layout="test/1", page_tokens=16, page_bytes=4096,
    shards=2, salt="s", extra={"a": "b"},
)  # fmt: skip


class FailedCall(grpc.RpcError):
    """What grpc raises for a failed call, reduced to what is read of it."""

    def __init__(self, code: object, details: str = "", metadata: object = ()) -> None:
        self._answers = {"code": code, "details": details, "trailing_metadata": metadata}

    def code(self) -> object:
        return self._answers["code"]

    def details(self) -> object:
        return self._answers["details"]

    def trailing_metadata(self) -> object:
        return self._answers["trailing_metadata"]


def test_status_table_has_every_error_class_and_no_other() -> None:
    assert set(wire.STATUS_BY_KIND) == set(errors.BY_KIND)
    assert len(set(wire.STATUS_BY_KIND.values())) == len(wire.STATUS_BY_KIND)


@pytest.mark.parametrize("kind", sorted(errors.BY_KIND))
def test_error_survives_the_wire_with_class_code_and_context(kind: str) -> None:
    sent = errors.BY_KIND[kind](
        "what, to what, what next", code="some_code", retryable=True, context={"page": 3}
    )
    metadata = ((wire.DETAIL_KEY, wire.error_to_detail(sent)),)
    got = wire.error_from_rpc(
        FailedCall(wire.status_of(sent), sent.message, metadata), address="unix:x"
    )
    assert type(got) is type(sent)
    assert (got.message, got.code, got.retryable, got.context) == (
        sent.message, "some_code", True, {"page": "3"},
    )  # fmt: skip


@pytest.mark.parametrize("kind", sorted(errors.BY_KIND))
def test_error_without_details_keeps_its_class_by_the_status(kind: str) -> None:
    got = wire.error_from_rpc(FailedCall(wire.STATUS_BY_KIND[kind], "text"), address="there")
    assert got.kind == kind or kind == "internal"
    assert "there" in got.message


@pytest.mark.parametrize(
    ("status", "details", "code", "retryable"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connect failed", "unavailable", True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "deadline", True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max", "message_too_large", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", "capacity", True),
        (grpc.StatusCode.UNKNOWN, "", "failed", False),
        (None, "", "failed", False),
    ],
)
def test_grpc_own_refusals_have_codes_of_ours(
    status: object, details: str, code: str, retryable: bool
) -> None:
    got = wire.error_from_rpc(FailedCall(status, details), address="there")
    assert (got.code, got.retryable) == (code, retryable)


def test_garbage_in_the_error_metadata_is_not_an_exception() -> None:
    metadata = ((wire.DETAIL_KEY, b"\xff\xff\xff"), ("other", "x"))
    call = FailedCall(grpc.StatusCode.DATA_LOSS, "text", metadata)
    assert wire.error_from_rpc(call, address="there").kind == "storage"
    assert wire.error_from_rpc(grpc.RpcError("bare"), address="there").kind == "transport"


def test_long_error_is_cut_to_what_metadata_takes() -> None:
    error = errors.UsageError("x" * 10**6, context={f"key{n}": "y" * 10**5 for n in range(100)})
    assert len(wire.error_to_detail(error)) < 7000


def test_namespace_survives_the_wire_with_its_id() -> None:
    message = wire.namespace_to_wire(SPACE)
    assert set(message.DESCRIPTOR.fields_by_name) == set(SPACE.to_fields())
    again = namespace_pb2.Namespace.FromString(message.SerializeToString())
    assert wire.namespace_from_wire(again) == SPACE
    assert wire.namespace_from_wire(again).id == SPACE.id


def test_namespace_with_a_field_of_a_newer_version_is_refused() -> None:
    data = wire.namespace_to_wire(SPACE).SerializeToString() + b"\xd2\x0f\x01a"
    with pytest.raises(errors.UsageError, match="upgrade"):
        wire.namespace_from_wire(namespace_pb2.Namespace.FromString(data))


def test_namespace_out_of_range_is_refused() -> None:
    with pytest.raises(errors.UsageError):
        wire.namespace_from_wire(namespace_pb2.Namespace(model="m"))


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.int32, ">u4"])
def test_tokens_survive_the_wire_whatever_their_type(dtype: str) -> None:
    tokens = np.array([0, 1, 2**31 - 1, 70000], dtype=dtype)
    got, keys = wire.prefix_from_wire(wire.prefix_to_wire(tokens, None))
    assert keys is None
    assert got is not None
    assert got.tolist() == tokens.tolist()


def test_keys_survive_the_wire() -> None:
    keys = [b"a", b"b" * 64]
    assert wire.prefix_from_wire(wire.prefix_to_wire(None, keys)) == (None, keys)


@pytest.mark.parametrize(
    ("prefix", "code"),
    [
        (pb.Prefix(), "no_prefix"),
        (pb.Prefix(tokens=b"123"), "bad_tokens"),
        (pb.Prefix(tokens=bytes(4 * wire.MAX_TOKENS + 4)), "too_many_tokens"),
        (pb.Prefix(keys=pb.EngineKeys(keys=[b""])), "bad_key"),
        (pb.Prefix(keys=pb.EngineKeys(keys=[b"x" * 65])), "bad_key"),
        (pb.Prefix(keys=pb.EngineKeys(keys=[b"x"] * (wire.MAX_KEYS + 1))), "too_many_keys"),
    ],
)
def test_bad_prefix_is_refused_by_the_server(prefix: pb.Prefix, code: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        wire.prefix_from_wire(prefix)
    assert caught.value.code == code


def test_bad_prefix_is_refused_by_the_client_before_it_is_sent() -> None:
    for tokens, keys in (
        (None, None), (np.zeros(1), [b"x"]), (np.zeros(wire.MAX_TOKENS + 1), None), (None, [b""]),
    ):  # fmt: skip
        with pytest.raises(errors.UsageError):
            wire.prefix_to_wire(tokens, keys)


def test_largest_prefix_fits_a_message() -> None:
    tokens = wire.prefix_to_wire(np.full(wire.MAX_TOKENS, 2**32 - 1, dtype=np.uint32), None)
    keys = wire.prefix_to_wire(None, [b"x" * wire.MAX_KEY_BYTES] * wire.MAX_KEYS)
    for prefix in (tokens, keys):
        header = pb.StoreRequest(header=pb.StoreHeader(namespace_id=bytes(16), prefix=prefix))
        assert header.ByteSize() < wire.MAX_MESSAGE_BYTES - 4096


def test_fill_is_the_inverse_of_plain_and_leaves_out_what_it_does_not_know() -> None:
    values = {
        "name": "n",
        "core": {"orphan_pages": 3, "namespaces": [{"ordinal": 1}], "of_a_newer_core": 1},
    }
    got = wire.plain(wire.fill(status_pb2.Status(), values))
    assert got["name"] == "n"
    assert got["core"]["orphan_pages"] == 3
    assert got["core"]["namespaces"][0]["ordinal"] == 1
    assert wire.plain(wire.fill(status_pb2.Status(), got)) == got

"""The one table that joins the error tree to gRPC status codes, and errors to their wire form.

Stateless; thread-safe. A test keeps the table equal to kvwarehouse.errors.BY_KIND.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from kvwarehouse.errors import BY_KIND, TransportError, UsageError, WarehouseError
from kvwarehouse.wire.generated import error_pb2 as pb

DETAIL_KEY: Final = "kvwarehouse-error-bin"

# Kind of kvwarehouse.errors to the status code a server answers with.
STATUS_BY_KIND: Final[Mapping[str, grpc.StatusCode]] = MappingProxyType(
    {
        "usage": grpc.StatusCode.INVALID_ARGUMENT,
        "capacity": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "pin": grpc.StatusCode.FAILED_PRECONDITION,
        "storage": grpc.StatusCode.DATA_LOSS,
        "transport": grpc.StatusCode.UNAVAILABLE,
        "internal": grpc.StatusCode.INTERNAL,
    }
)

# Codes whose status is narrower than their kind's: generic gRPC clients tell these apart.
STATUS_BY_CODE: Final[Mapping[str, grpc.StatusCode]] = MappingProxyType(
    {
        "namespace_unknown": grpc.StatusCode.NOT_FOUND,
        "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
        "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    }
)

# What a status code without an ErrorDetail means: gRPC itself refused, or it is not our server.
_KIND_BY_STATUS: Final[Mapping[grpc.StatusCode, tuple[str, str, bool]]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: ("usage", "usage", False),
        grpc.StatusCode.OUT_OF_RANGE: ("usage", "usage", False),
        grpc.StatusCode.NOT_FOUND: ("usage", "not_found", False),
        grpc.StatusCode.UNAUTHENTICATED: ("usage", "unauthenticated", False),
        grpc.StatusCode.PERMISSION_DENIED: ("usage", "denied", False),
        grpc.StatusCode.UNIMPLEMENTED: ("usage", "unimplemented", False),
        grpc.StatusCode.RESOURCE_EXHAUSTED: ("capacity", "capacity", True),
        grpc.StatusCode.FAILED_PRECONDITION: ("pin", "pin", False),
        grpc.StatusCode.DATA_LOSS: ("storage", "storage", False),
        grpc.StatusCode.UNAVAILABLE: ("transport", "unavailable", True),
        grpc.StatusCode.DEADLINE_EXCEEDED: ("transport", "deadline", True),
        grpc.StatusCode.CANCELLED: ("transport", "cancelled", True),
    }
)

# Trailing metadata has a bound of 8 KiB in most implementations.
_MESSAGE_CHARS: Final = 2048
_CONTEXT_CHARS: Final = 256
_CONTEXT_FIELDS: Final = 8


def status_of(error: WarehouseError) -> grpc.StatusCode:
    """The status code that a server answers `error` with."""
    return STATUS_BY_CODE.get(error.code) or STATUS_BY_KIND[error.kind]


def error_to_detail(error: WarehouseError) -> bytes:
    """`error` as the value of the trailing metadata DETAIL_KEY. At most about 6 KiB: long texts
    are cut."""
    context = dict(list(error.context.items())[:_CONTEXT_FIELDS])
    return pb.ErrorDetail(
        kind=error.kind,
        code=error.code,
        message=error.message[:_MESSAGE_CHARS],
        retryable=error.retryable,
        context={key[:64]: value[:_CONTEXT_CHARS] for key, value in context.items()},
    ).SerializeToString()


def error_from_rpc(error: grpc.RpcError, *, address: str) -> WarehouseError:
    """The exception of our tree for a failed call to `address`. Does not raise it. Falls back to
    the bare status code where the details are missing or not ours."""
    detail = _find_detail(_call(error, "trailing_metadata") or ())
    if detail is not None and detail.kind in BY_KIND:
        return BY_KIND[detail.kind](
            detail.message,
            code=detail.code,
            retryable=detail.retryable,
            context=dict(detail.context),
        )
    status = _call(error, "code")
    text = str(_call(error, "details") or error)[:_MESSAGE_CHARS]
    kind, code, retryable = _KIND_BY_STATUS.get(status, ("transport", "failed", False))
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        # gRPC's own refusal of a message over its bound: the same message fails again.
        kind, code, retryable = "usage", "message_too_large", False
    return BY_KIND[kind](
        _explain(kind, code, address, text),
        code=code,
        retryable=retryable,
        context={"address": address, "status": getattr(status, "name", "UNKNOWN")},
    )


def _explain(kind: str, code: str, address: str, text: str) -> str:
    if code == "unavailable":
        return f"no daemon answers at {address}: {text}; is `kvwarehouse serve` running there?"
    if kind == TransportError.kind:
        return f"the call to {address} failed ({code}): {text}"
    if kind == UsageError.kind:
        return f"{address} refused the call ({code}): {text}"
    return f"{address} failed ({code}): {text}"


def _find_detail(metadata: Iterable[tuple[str, Any]]) -> pb.ErrorDetail | None:
    for key, value in metadata:
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def _call(error: grpc.RpcError, name: str) -> Any:
    """RpcError promises no methods; those of real calls have code(), details() and metadata."""
    method = getattr(error, name, None)
    return method() if callable(method) else None

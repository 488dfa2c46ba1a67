"""The messages and stubs of kvwarehouse.v1, re-exported so that only this package imports them.

Enumerated, so that a message that the contract loses is missed here and not at the first call.
"""

from kvwarehouse.wire.generated.warehouse_pb2 import (
    CheckRequest,
    ClearRequest,
    DrainRequest,
    EvictRequest,
    FlushRequest,
    ListNamespacesRequest,
    ListPagesRequest,
    LoadRequest,
    LookupRequest,
    OpenNamespaceRequest,
    StatusRequest,
    StoreHeader,
    StoreRequest,
    SweepRequest,
)
from kvwarehouse.wire.generated.warehouse_pb2_grpc import WarehouseStub

__all__ = [
    "CheckRequest",
    "ClearRequest",
    "DrainRequest",
    "EvictRequest",
    "FlushRequest",
    "ListNamespacesRequest",
    "ListPagesRequest",
    "LoadRequest",
    "LookupRequest",
    "OpenNamespaceRequest",
    "StatusRequest",
    "StoreHeader",
    "StoreRequest",
    "SweepRequest",
    "WarehouseStub",
]

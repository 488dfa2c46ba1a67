"""The wire contract kvwarehouse.v1: generated messages and stubs, their bounds, conversions, and
the table that joins errors to status codes. Sole importer of kvwarehouse.wire.generated."""

from kvwarehouse.wire.generated import error_pb2, namespace_pb2, status_pb2, warehouse_pb2
from kvwarehouse.wire.generated.warehouse_pb2_grpc import (
    WarehouseServicer,
    WarehouseStub,
    add_WarehouseServicer_to_server,
)
from kvwarehouse.wire.limits import (
    CHANNEL_OPTIONS,
    CHUNK_BYTES,
    MAX_EVICT_PAGES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_LIST_BYTES,
    MAX_LIST_PAGES,
    MAX_LIST_REQUESTS,
    MAX_MESSAGE_BYTES,
    MAX_NOTES,
    MAX_TOKENS,
)
from kvwarehouse.wire.messages import (
    fields_from_wire,
    fill,
    namespace_from_wire,
    namespace_to_wire,
    plain,
    prefix_from_wire,
    prefix_to_wire,
)
from kvwarehouse.wire.status_codes import (
    DETAIL_KEY,
    STATUS_BY_CODE,
    STATUS_BY_KIND,
    error_from_rpc,
    error_to_detail,
    status_of,
)

SERVICE_NAME = "kvwarehouse.v1.Warehouse"

__all__ = [
    "CHANNEL_OPTIONS",
    "CHUNK_BYTES",
    "DETAIL_KEY",
    "MAX_EVICT_PAGES",
    "MAX_KEYS",
    "MAX_KEY_BYTES",
    "MAX_LIST_BYTES",
    "MAX_LIST_PAGES",
    "MAX_LIST_REQUESTS",
    "MAX_MESSAGE_BYTES",
    "MAX_NOTES",
    "MAX_TOKENS",
    "SERVICE_NAME",
    "STATUS_BY_CODE",
    "STATUS_BY_KIND",
    "WarehouseServicer",
    "WarehouseStub",
    "add_WarehouseServicer_to_server",
    "error_from_rpc",
    "error_pb2",
    "error_to_detail",
    "fields_from_wire",
    "fill",
    "namespace_from_wire",
    "namespace_pb2",
    "namespace_to_wire",
    "plain",
    "prefix_from_wire",
    "prefix_to_wire",
    "status_of",
    "status_pb2",
    "warehouse_pb2",
]

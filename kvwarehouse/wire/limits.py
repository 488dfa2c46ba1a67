"""Bounds of the wire contract, as proto/kvwarehouse/v1/warehouse.proto states them.

Both ends use these numbers, so that neither sends what the other refuses.
"""

from collections.abc import Sequence

CHUNK_BYTES = 1 << 20
"""KV in one message. Larger chunks measured slower (4 MiB: 0.6 of the rate of 1 MiB)."""

MAX_TOKENS = 1 << 20
"""Token ids in one prefix: the longest context windows of today's models; 4 MiB packed."""

MAX_KEYS = 1 << 16
"""Engine keys in one prefix: MAX_TOKENS in pages of 16, the smallest blocks engines use."""

MAX_KEY_BYTES = 64
"""One engine key; the same number as native/base/types.h."""

MAX_MESSAGE_BYTES = 8 << 20
"""Any message: room for the largest prefix (65,536 keys of 64 bytes: 4.3 MiB) and the rest."""

MAX_LIST_PAGES = 1000
"""Pages of one ListPages answer: about 100 bytes each."""

MAX_LIST_BYTES = 7 << 20
"""Namespaces of one ListNamespaces answer: a message, but for what frames 4,096 of them."""

MAX_LIST_REQUESTS = 1000
"""Requests of one ListRequests answer, if as many fit MAX_LIST_BYTES."""

MAX_NOTES = 256
"""Requests of one NoteRequests: each has the core look at up to 64 pages."""

MAX_EVICT_PAGES = 100_000
"""Pages of one Evict: bounds the tombstones of one ledger transaction."""

CHANNEL_OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Identity alone. grpcio 1.76 and 1.78 unpack a message whole, and then look at its size.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
)
"""For servers and channels alike. gRPC's own defaults are 4 MiB in and no bound out, and it unpacks
what is compressed; KV and digests do not compress."""

"""Objects of the remote tier, made here byte by byte as docs/format.md has them, so that what reads
them is not compared with what wrote them."""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Final

import numpy as np

from kvwarehouse import core
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.names import PagesName

_BLOCK: Final = 4096
_SEGMENT: Final = 0xFFFFFFFE
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sII16sIIII16s16s16sIIIIIIQQQQ")


def _xxh3(data: bytes) -> int:
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_64bits.restype = ctypes.c_uint64
    return int(library.XXH3_64bits(data, ctypes.c_size_t(len(data))))


def made_object(
    secret: FleetSecret,
    namespace: bytes,
    day: int,
    rng: random.Random,
    *,
    page_tokens: int = 64,
    page_bytes: int = 5000,
) -> tuple[PagesName, bytes]:
    """The second run of some prompt."""
    pages = 256 // page_tokens
    tokens = np.array([rng.getrandbits(32) for _ in range(2 * pages * page_tokens)], np.uint32)
    keys = [bytes(key) for key in core.chain_keys(secret.secret, namespace, tokens, page_tokens)]
    records = []
    for at in range(pages, 2 * pages):
        ids = tokens[at * page_tokens : (at + 1) * page_tokens].tobytes()
        payload = rng.randbytes(page_bytes)
        digest = core.page_digest(np.frombuffer(payload, np.uint8), keys[at], 0)
        blocks = -(-page_bytes // _BLOCK)
        head = _HEAD.pack(
            b"KVWRECD1", 1, _BLOCK, secret.fleet_id, _SEGMENT, _VERSION,
            (at - pages) * (1 + blocks), 1 + blocks, keys[at], keys[at - 1], namespace,
            at, 1, page_tokens, 1, len(ids), 0, page_bytes, 0, 0, 0,
        )  # fmt: skip
        body = (head + struct.pack("<Q", digest) + ids).ljust(_BLOCK - 8, b"\0")
        header = struct.pack("<Q", _xxh3(body)) + body
        records.append(header + payload.ljust(blocks * _BLOCK, b"\0"))
    return PagesName(namespace, 0, day, keys[-1]), b"".join(records)

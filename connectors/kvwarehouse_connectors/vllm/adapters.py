"""LoRA adapters by their weights: vLLM's hashes have only their names and paths.

An adapter is fingerprinted when the engine first uses it, and looked at again with each request.
One whose files changed since is ambiguous, even when the engine loads it anew: vLLM's own cache
still has blocks of the old weights under the same hashes. So its requests neither load nor store
until that cache is reset.

Not thread-safe.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any

import kvwarehouse as kvw

_log = logging.getLogger(__name__)

_MOST_KNOWN = 4096

Signature = tuple[tuple[str, int, int, int], ...]


class Adapters:
    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Signature, bytes | None]] = {}

    def fingerprint(self, lora: Any) -> bytes | None:
        """32 bytes for the adapter of a request, b"" for none of its own; None where it is not
        known what weights its KV has."""
        if lora is None:
            return b""
        name = (str(lora.lora_name), str(lora.lora_path))
        signature = _signature(name[1])
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                return None
            digest = _digest(name[1])
            if digest is not None and _signature(name[1]) != signature:
                digest = None  # it was being written
            self._known[name] = (signature, digest)
            return digest
        if known[0] != signature and known[1] is not None:
            _log.warning(
                "the files of adapter %s changed while the engine uses it: its KV is neither loaded"
                " nor stored until the cache is reset (reset_prefix_cache(reset_connector=True))",
                name[0],
            )
            self._known[name] = (known[0], None)
            return None
        return known[1]

    def forget(self) -> None:
        """The engine's cache was reset, with all blocks of earlier adapters in it."""
        self._known.clear()


def _digest(path: str) -> bytes | None:
    try:
        return hashlib.blake2b(kvw.fingerprint(path).encode(), digest_size=32).digest()
    except kvw.UsageError as error:
        _log.warning("an adapter cannot be fingerprinted, its KV is not shared: %s", error)
        return None


def _signature(path: str) -> Signature:
    found = []
    try:
        for entry in os.scandir(path):
            facts = entry.stat()
            found.append((entry.name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    except OSError:
        return ()
    return tuple(sorted(found))

"""LoRA adapters by their weights: vLLM's hashes have only their names and paths.

No hook tells which weights the workers loaded. So an adapter is what its files were when a request
with it first came, for as long as they stay so: a thread reads what is new, and another looks at
what was read for each request, and again and again while requests compute. What cannot be known is
None, and such requests neither load nor store:
- Files that changed: the engine may have the old weights or the new under this number, for good.
- A name and path under which vLLM's cache has blocks of other files, until that cache is reset:
  the blocks have the same hashes.
- An adapter that is loaded anew with each step (load_inplace).
- A name of the hub before the engine has used it: vLLM downloads what is newest there.

The threads may hang in a file system; nobody waits for them longer than a moment.

Thread-safe. Nothing here blocks, and nothing raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm.adapter_files import Signature, files_digest, find_files

_log = logging.getLogger(__name__)

_MOST_KNOWN = 16_384
# A request waits for its look so long; vLLM itself waits for the same files without a bound.
_PATIENCE_S = 2.0
# Files of an adapter that requests compute with are looked at so often, and what was seen counts
# for so long. Steps ask for it, and a step of a large model may take seconds: so it goes on for a
# while behind the last of them.
_LOOK_EVERY_S = 0.1
_FRESH_S = 1.0
_WANTED_S = 30.0


@dataclass(eq=False)
class _Adapter:
    """What the engine has under one number."""

    name: tuple[str, str]
    """And path: all that vLLM's hashes have of it."""
    asked: int = 0
    answered: int = 0
    """Looks, of those that were asked for."""
    looked_s: float = float("-inf")
    """When the last began that is answered."""
    wanted_s: float = float("-inf")
    """When a step last asked."""
    waiting: bool = False
    used: bool = False
    """A request with it has computed: the engine has loaded it."""
    signature: Signature | None = None
    digest: bytes | None = None
    lost: bool = False
    """Nobody can know what weights it has."""


@dataclass(eq=False)
class AdapterLook:
    """At a request's adapter, after the request came."""

    adapter: _Adapter
    number: int
    asked_s: float
    renewed: bool = False


class Adapters:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._known: dict[int, _Adapter] = {}
        self._cached: dict[tuple[str, str], Signature | None] = {}
        """Of which files vLLM's cache may have blocks; None: of several."""
        # Of files that were read before, and of others: to read those may take long.
        self._waiting: dict[bool, deque[_Adapter]] = {True: deque(), False: deque()}
        self._wanted: set[_Adapter] = set()
        self._started = False
        self._full = False
        self._closed = False

    def look(self, lora: Any) -> AdapterLook | None:
        """For a request that has come; None where it has no adapter."""
        if lora is None:
            return None
        name = (str(lora.lora_name), str(lora.lora_path))
        with self._changed:
            adapter = self._of_number(int(lora.lora_int_id), name)
            if adapter.name != name or getattr(lora, "load_inplace", False):
                self._lose(adapter, "another one is loaded in its place")
            if adapter.lost:
                self._cached[name] = None
            return AdapterLook(adapter, self._ask(adapter), time.monotonic())

    def pending(self, look: AdapterLook) -> bool:
        """Whether the request should wait, a moment, for what the look finds."""
        with self._changed:
            adapter, now = look.adapter, time.monotonic()
            if adapter.lost or self._closed:
                return False
            if adapter.answered < look.number:
                return now < look.asked_s + _PATIENCE_S
            if now <= adapter.looked_s + _FRESH_S or look.renewed:
                return False
            # The request has waited for its turn since then.
            look.renewed, look.asked_s = True, now
            look.number = self._ask(adapter)
            return True

    def fingerprint(self, look: AdapterLook | None) -> bytes | None:
        """32 bytes for the adapter of a request, b"" for none of its own; None where it is not
        known what weights its KV has."""
        if look is None:
            return b""
        with self._changed:
            return self._digest(look)

    def still_known(self, look: AdapterLook) -> bool:
        """Of a request that computes: whether its KV is of the fingerprint, as far as the files
        tell that were looked at a moment ago."""
        with self._changed:
            self._want(look.adapter)
            fresh = time.monotonic() <= look.adapter.looked_s + _FRESH_S
            return fresh and self._digest(look) is not None

    def keep_fresh(self, looks: Iterable[AdapterLook]) -> None:
        """With each step, of requests that compute."""
        with self._changed:
            for adapter in {look.adapter for look in looks}:
                self._want(adapter)

    def used(self, request: Any) -> None:
        """A request has ended."""
        lora = request.lora_request
        if lora is None or not request.num_output_tokens:
            return
        with self._changed:
            adapter = self._known.get(int(lora.lora_int_id))
            if adapter is not None:
                adapter.used = True

    def forget(self) -> None:
        """The engine's cache was reset, with all blocks of earlier adapters in it. What the engine
        has loaded stays as it is."""
        with self._changed:
            self._cached.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- with the lock held ------------------------------------------------------------------------

    def _of_number(self, number: int, name: tuple[str, str]) -> _Adapter:
        adapter = self._known.get(number)
        if adapter is not None:
            return adapter
        adapter = _Adapter(name)
        if len(self._known) < _MOST_KNOWN:
            self._known[number] = adapter
            return adapter
        adapter.lost = True
        if not self._full:
            self._full = True
            _log.warning(
                "kvwarehouse: the engine has had %d adapters; KV of further ones is not shared"
                " until it is started again",
                _MOST_KNOWN,
            )
        return adapter

    def _ask(self, adapter: _Adapter) -> int:
        """The number of a look that begins after now."""
        if adapter.lost or self._closed:
            return adapter.asked
        adapter.asked += 1
        if not adapter.waiting:
            adapter.waiting = True
            self._waiting[adapter.signature is not None].append(adapter)
            self._changed.notify_all()
        if not self._started:
            self._started = True
            for again in (False, True):
                # Daemon threads: what hangs in a file system must not keep the engine from ending.
                threading.Thread(
                    target=self._run, args=(again,), name="kvw-adapters", daemon=True
                ).start()
        return adapter.asked

    def _want(self, adapter: _Adapter) -> None:
        adapter.wanted_s = time.monotonic()
        if adapter not in self._wanted:
            self._wanted.add(adapter)
            self._changed.notify_all()  # from now on without being asked

    def _keep_fresh(self) -> None:
        now = time.monotonic()
        self._wanted = {each for each in self._wanted if now <= each.wanted_s + _WANTED_S}
        for adapter in self._wanted:
            if adapter.answered == adapter.asked and now > adapter.looked_s + _LOOK_EVERY_S:
                self._ask(adapter)

    def _digest(self, look: AdapterLook) -> bytes | None:
        adapter = look.adapter
        if adapter.digest is None or adapter.answered < look.number:
            return None
        cached = self._cached.setdefault(adapter.name, adapter.signature)
        return adapter.digest if cached == adapter.signature else None

    def _lose(self, adapter: _Adapter, why: object) -> None:
        if not adapter.lost:
            _log.warning(
                "kvwarehouse: KV of the adapter %s (%s) is not shared: %s", *adapter.name, why
            )
        adapter.lost, adapter.digest = True, None
        self._cached[adapter.name] = None

    def _answer(self, adapter: _Adapter, look: int, began_s: float, seen: _Seen) -> None:
        adapter.answered, adapter.looked_s = look, began_s
        if adapter.lost or seen.signature is None:
            return
        first = adapter.signature is None
        if first:
            adapter.signature, adapter.digest = seen.signature, seen.digest
        elif adapter.signature != seen.signature:
            self._lose(
                adapter,
                "its files have changed since the engine first used it, so that it may have either"
                " weights. Load what is new from another folder",
            )
            return
        if self._cached.setdefault(adapter.name, adapter.signature) == adapter.signature:
            return
        self._cached[adapter.name] = None
        if first:
            _log.warning(
                "kvwarehouse: the adapter %s (%s) had other files before, of which vLLM's cache may"
                " have blocks: its KV is not shared until that cache is reset"
                " (with the connector where it is WarehouseOffloadingConnector)",
                *adapter.name,
            )

    # -- in the threads ----------------------------------------------------------------------------

    def _run(self, again: bool) -> None:
        """again: it looks at files that were read before."""
        waiting = self._waiting[again]
        while True:
            with self._changed:
                while not waiting and not self._closed:
                    self._changed.wait(_LOOK_EVERY_S if again and self._wanted else None)
                    if again:
                        self._keep_fresh()
                if self._closed:
                    return
                adapter = waiting.popleft()
                adapter.waiting = False
                look, first, used = adapter.asked, adapter.signature is None, adapter.used
            began_s, seen = time.monotonic(), _Seen()
            failed: Exception | None = None
            try:
                seen = _see(adapter.name[1], first, used)
            except Exception as error:  # noqa: BLE001 - a thread's edge: such an adapter is not shared
                failed = error
            with self._changed:
                if failed is not None:
                    self._lose(adapter, failed)
                self._answer(adapter, look, began_s, seen)


@dataclass(frozen=True)
class _Seen:
    """signature: None where the adapter cannot be known yet."""

    signature: Signature | None = None
    digest: bytes | None = None


def _see(path: str, first: bool, used: bool) -> _Seen:
    """first: the files are to be read. used: the engine has loaded them. Raises where they cannot
    be read."""
    files = find_files(path)
    if files is None:
        return _Seen() if first else _Seen(())
    if files.from_hub and not used:
        return _Seen()
    if not first:
        return _Seen(files.signature)
    digest = files_digest(files)
    again = find_files(path)
    if again is None or again.signature != files.signature:
        raise kvw.UsageError("its files changed while they were read", code="bad_fingerprint")
    return _Seen(files.signature, digest)

"""The transport of a client on the daemon's host: shared memory, by the native client.

Thread-safe. Lookups and loads of DRAM pages make no call; after a daemon's restart the native
client reconnects by itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvwarehouse import core
from kvwarehouse.client.endpoint import Address, daemon_uid
from kvwarehouse.client.pins import Pins
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.requests import (
    LoadRequest,
    LookupRequest,
    PinRequest,
    ReleaseRequest,
    StoreRequest,
    TiersRequest,
)
from kvwarehouse.client.session import Session
from kvwarehouse.client.transport import Transport
from kvwarehouse.errors import StorageError
from kvwarehouse.types import Control, Loaded, Match, Namespace, StoreResult

_log = logging.getLogger(__name__)

# 2^64 over the golden ratio: shards of a page are far from each other, and from other pages'.
_SHARD_STEP = 0x9E3779B97F4A7C15

_DRAINING = 2
"""ControlState::draining of native/control/control.h."""
_JUDGED = ("draining", "remote_serving")
"""Fields of Control that are no words of the control page."""


class _ReadRequest(Protocol):
    """A request that only reads."""

    def missed(self) -> Any: ...


_Request = TypeVar("_Request", bound=_ReadRequest)
_Answer = TypeVar("_Answer")


def _missed_where_lost(
    call: Callable[[SharedMemory, _Request], _Answer],
) -> Callable[[SharedMemory, _Request], _Answer]:
    """`call`, and a miss where somebody has cut the control page: the native client cannot tell
    there how many pages were asked for. A store is told so instead."""

    @functools.wraps(call)
    def read(self: SharedMemory, request: _Request) -> _Answer:
        try:
            return call(self, request)
        except StorageError as error:
            if error.code != "memory_lost":
                raise
            missed: _Answer = request.missed()
            return missed

    return read


class SharedMemory(Transport):
    def __init__(self, address: Address, session: Session, timeout_s: float) -> None:
        self.patient = session.patience_s != 0
        self.timeout_s = timeout_s
        self._registration_known = False
        self.native = core.NativeClient(
            address.path,
            session.verify == "always",
            timeout_s,
            session.patience_s,
            session.read_only,
            daemon_uid(),
        )

    @property
    def shared_memory(self) -> SharedMemory:
        return self

    def has_namespace(self, space: Namespace) -> bool:
        return self.native.has_namespace(space.id)

    @_missed_where_lost
    def lookup(self, request: LookupRequest) -> Match:
        prefix = request.prefix
        return request.match(*self.native.lookup(request.space.id, prefix.tokens, prefix.keys))

    @_missed_where_lost
    def load(self, request: LoadRequest) -> Loaded:
        pages, missed = self.native.load(
            request.space.id,
            request.prefix.tokens,
            request.prefix.keys,
            request.first,
            self._native_regions(request.out),
            request.shard,
            request.timeout_s,
        )
        return Loaded(pages, missed)

    def store(self, request: StoreRequest) -> StoreResult:
        stored, already, dropped = self.native.store(
            request.space.id,
            request.prefix.tokens,
            request.prefix.keys,
            request.first,
            self._native_regions(request.pages),
            request.shard,
            request.timeout_s,
            request.since_epoch,
        )
        return StoreResult(stored, already, dropped)

    @_missed_where_lost
    def release(self, request: ReleaseRequest) -> int:
        prefix = request.prefix
        return self.native.release(request.space.id, prefix.tokens, prefix.keys, request.first)

    def close(self) -> None:
        self.native.close()

    # --- what no other transport has

    def sees_namespace(self, space: Namespace) -> bool:
        """Returns True when the memory that is mapped now shows `space`. No call."""
        return self.native.sees_namespace(space.id)

    def refresh(self, timeout_s: float) -> bool:
        """Returns True when a daemon answers; finds a new one if it must."""
        return self.native.refresh(timeout_s)

    def control(self) -> Control:
        page = self.native.control()
        return Control(
            draining=page["state"] == _DRAINING,
            remote_serving=page["remote_serving"] == 1,
            **{name: page[name] for name in Control.__dataclass_fields__ if name not in _JUDGED},
        )

    @_missed_where_lost
    def tiers(self, request: TiersRequest) -> NDArray[np.uint8]:
        """A Tier for each page."""
        prefix = request.prefix
        return self.native.tiers(request.space.id, prefix.tokens, prefix.keys, request.counted)

    @_missed_where_lost
    def pin(self, request: PinRequest) -> Pins:
        prefix, first = request.prefix, request.first
        held = self.native.pin(
            request.space.id, prefix.tokens, prefix.keys, first, request.timeout_s
        )
        return Pins(held)

    def clear_epoch(self, space: Namespace) -> int | None:
        """Other than before if `space` was cleared; None: it is not in the memory that is mapped
        now. No call."""
        return self.native.clear_epoch(space.id)

    def tags(self, request: LoadRequest) -> NDArray[np.uint64]:
        """A word for each page of the prompt, of the request's shard: as good as its key and shard
        for telling it from others."""
        prefix = request.prefix
        tags = self.native.tags(request.space.id, prefix.tokens, prefix.keys)
        return tags + np.uint64(request.shard * _SHARD_STEP % (1 << 64))

    def hold(self, request: LoadRequest) -> core.Extents:
        """The pages that are on NVMe, from the request's first on, held there."""
        prefix = request.prefix
        part = (request.first, request.out.count, request.shard)
        return self.native.hold(
            request.space.id, prefix.tokens, prefix.keys, part, request.timeout_s
        )

    def segments(self, timeout_s: float) -> str:
        """Where the daemon's segments are, as a path for any process of this user; "" where it has
        none, or does not say."""
        return self.native.segments(timeout_s)

    def use_device(self, ordinal: int) -> None:
        """Loads the kernels onto a GPU, unless they are there, and takes the memory of one load or
        store. Blocks for a second the first time in a process."""
        if self.native.has_device(ordinal):
            return
        from kvwarehouse.client.gpu.at_exit import stop_at_exit
        from kvwarehouse.client.gpu.kernels import compiled

        self.native.use_device(ordinal, compiled(*core.device_capability(ordinal)))
        stop_at_exit(self)

    def stop_registering(self, timeout_s: float) -> None:
        """As the process ends: nothing more is registered with a GPU's driver, nor undone."""
        self.native.stop_registering(timeout_s)

    def device_stage(self, ordinal: int, size_bytes: int) -> core.DeviceStage:
        """Memory of a GPU for held pages to land in."""
        self.use_device(ordinal)
        return self.native.device_stage(ordinal, size_bytes)

    def _native_regions(self, regions: Regions) -> core.Regions:
        """Their native form; the first time on a device it is made ready, which takes a second."""
        if regions.place is not None:
            self.use_device(regions.place.ordinal)
            self._tell_refusal()
        return regions.native()

    def _tell_refusal(self) -> None:
        """Once: that the arena is not registered, so that its pages take a copy more."""
        if self._registration_known:
            return
        size_bytes, settled, refusal = self.native.registration()
        self._registration_known = settled or bool(refusal)
        if not refusal:
            return
        _log.warning(
            "parts of the arena are not registered with CUDA (%d bytes are); their pages go through"
            " a pinned buffer, which is slower: %s",
            size_bytes,
            refusal,
        )

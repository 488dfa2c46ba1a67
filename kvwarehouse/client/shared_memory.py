"""The data path of a client on the daemon's host: shared memory, by the native client.

Thread-safe. Lookups and loads of DRAM pages make no call; after a daemon's restart the native
client reconnects by itself.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from kvwarehouse import core
from kvwarehouse.client.endpoint import Address, daemon_uid
from kvwarehouse.client.prompt import Prefix, Window
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.session import Session
from kvwarehouse.client.transport import Pinned, Transport
from kvwarehouse.types import Control, Namespace

_log = logging.getLogger(__name__)

_DRAINING = 2
"""ControlState::draining of native/control/control.h."""


class SharedMemory(Transport):
    shares_memory = True

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

    def opened(self, space: Namespace) -> bool:
        return self.native.has_namespace(space.id)

    def sees(self, space: Namespace) -> bool:
        return self.native.sees_namespace(space.id)

    def refresh(self, timeout_s: float) -> bool:
        return self.native.refresh(timeout_s)

    def control(self) -> Control:
        page = self.native.control()
        return Control(
            draining=page["state"] == _DRAINING,
            **{name: page[name] for name in Control.__dataclass_fields__ if name != "draining"},
        )

    def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        return self.native.lookup(space.id, prefix.tokens, prefix.keys)

    def tiers(self, space: Namespace, prefix: Prefix, *, counted: bool) -> NDArray[np.uint8]:
        return self.native.tiers(space.id, prefix.tokens, prefix.keys, counted)

    def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> tuple[int, dict[str, int]]:
        return self.native.load(
            space.id,
            prefix.tokens,
            prefix.keys,
            window.first,
            self._regions(out),
            window.shard,
            timeout_s,
        )

    def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> tuple[int, int, dict[str, int]]:
        return self.native.store(
            space.id,
            prefix.tokens,
            prefix.keys,
            window.first,
            self._regions(pages),
            window.shard,
            timeout_s,
        )

    def _regions(self, regions: Regions) -> core.Regions:
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

    def use_device(self, ordinal: int) -> None:
        if self.native.has_device(ordinal):
            return
        from kvwarehouse.client.gpu.at_exit import stop_at_exit
        from kvwarehouse.client.gpu.kernels import compiled

        self.native.use_device(ordinal, compiled(*core.device_capability(ordinal)))
        stop_at_exit(self)

    def stop_registering(self, timeout_s: float) -> None:
        """As the process ends: nothing more is registered with a GPU's driver, nor undone."""
        self.native.stop_registering(timeout_s)

    def tags(self, space: Namespace, prefix: Prefix) -> NDArray[np.uint64]:
        return self.native.tags(space.id, prefix.tokens, prefix.keys)

    def hold(
        self, space: Namespace, prefix: Prefix, window: Window, timeout_s: float
    ) -> core.Extents:
        part = (window.first, window.pages, window.shard)
        return self.native.hold(space.id, prefix.tokens, prefix.keys, part, timeout_s)

    def segments(self, timeout_s: float) -> str:
        return self.native.segments(timeout_s)

    def device_stage(self, ordinal: int, size_bytes: int) -> core.DeviceStage:
        self.use_device(ordinal)
        return self.native.device_stage(ordinal, size_bytes)

    def pin(self, space: Namespace, prefix: Prefix, first: int, timeout_s: float) -> Pinned:
        return self.native.pin(space.id, prefix.tokens, prefix.keys, first, timeout_s)

    def close(self) -> None:
        self.native.close()

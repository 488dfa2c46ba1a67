"""The data path of a client that shares no memory with the daemon: KV in chunks over gRPC.

Thread-safe as its channel is.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.prefix import Prefix, Window
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.rpc import Channel
from kvwarehouse.client.transfer import Filling, Loading, Storing, Transfers
from kvwarehouse.client.transport import DataPath, Pinned
from kvwarehouse.errors import TransportError
from kvwarehouse.types import Control, Namespace

if TYPE_CHECKING:
    from kvwarehouse import core


class RemotePath(DataPath):
    shares_memory = False
    patient = True

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._transfers = Transfers(channel.dial)

    def opened(self, space: Namespace) -> bool:
        return False  # only the daemon knows; it is asked once a namespace

    def sees(self, space: Namespace) -> bool:
        return False

    def refresh(self, timeout_s: float) -> bool:
        raise self._transfers.no_refresh()

    def control(self) -> Control:
        raise self._transfers.no_control()

    def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        return self._channel.ask(self._transfers.lookup(space, prefix))

    def tiers(self, space: Namespace, prefix: Prefix, *, counted: bool) -> NDArray[np.uint8]:
        raise self._transfers.no_tiers()

    def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> Loading:
        filling = Filling(out, window.pages)
        call = self._transfers.load(space, prefix, window, filling, timeout_s)
        try:
            with closing(self._channel.stream(call)) as answers:
                for loading in answers:
                    if loading is not None:
                        return loading
        except TransportError as error:
            if error.code != "deadline":
                raise
            return filling.cut()
        raise self._transfers.without_summary()

    def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> Storing:
        return self._channel.ask(self._transfers.store(space, prefix, window, pages, timeout_s))

    def pin(self, space: Namespace, prefix: Prefix, first: int, timeout_s: float) -> Pinned:
        raise self._transfers.no_pins()

    def tags(self, space: Namespace, prefix: Prefix) -> NDArray[np.uint64]:
        raise self._transfers.no_tiers()

    def hold(
        self, space: Namespace, prefix: Prefix, window: Window, timeout_s: float
    ) -> core.Extents:
        raise self._transfers.no_pins()

    def segments(self, timeout_s: float) -> str:
        return ""

    def use_device(self, ordinal: int) -> None:
        raise self._transfers.no_pins()

    def device_stage(self, ordinal: int, size_bytes: int) -> core.DeviceStage:
        raise self._transfers.no_pins()

    def close(self) -> None:
        """Nothing of its own: the channel belongs to the client."""

"""Which way the pages of a cache group's tensors go: to host memory, straight to a GPU, or to a
device through a buffer. One for an engine's process; needs torch.

Not thread-safe: groups are registered one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.device_copies import DeviceCopies, EngineStream, device_copies
from kvwarehouse_connectors.core.device_memory import DeviceMemory
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.layout_self_test import addresses_fit
from kvwarehouse_connectors.core.memory import BlockMemory, HostMemory
from kvwarehouse_connectors.core.pinned_memory import PinnedMemory
from kvwarehouse_connectors.core.torch_stream import TorchStream


class TensorMemories:
    """wish: the setting device_copies. on_fallback: as DeviceCopies has it."""

    def __init__(
        self,
        wish: str,
        on_fallback: Callable[[], None],
        stream_of: Callable[[Any], EngineStream] = TorchStream,
    ) -> None:
        self._wish = wish
        self._on_fallback = on_fallback
        self._stream_of = stream_of
        self._asked = False
        self._copies: DeviceCopies | None = None
        self._address = 0

    def memory(self, layout: BlockLayout, views: Sequence[Any], num_blocks: int) -> BlockMemory:
        """layout, views: the same blocks, none of them in use yet."""
        device = views[0].device
        if device.type == "cpu":
            return HostMemory(layout)
        host, stream = DeviceMemory(views), self._stream_of(device)
        copies = self._of_device(stream, layout)
        if copies is None or not copies.usable:
            return host
        if not addresses_fit(layout, host, num_blocks):
            copies.give_up(
                f"a cache of {len(views)} tensors like {tuple(views[0].shape)}, strides"
                f" {views[0].stride()}, is not where its strides say"
            )
            return host
        try:
            return PinnedMemory(layout, host, copies, stream)
        except kvw.WarehouseError as error:
            copies.give_up(str(error))
            return host

    @property
    def device_address(self) -> int:
        """In the memory of the device that pages go straight to and from; 0: to none."""
        return self._address if self._copies is not None and self._copies.usable else 0

    def close(self) -> None:
        """When no load is made any more."""
        if self._copies is not None:
            self._copies.close()

    def _of_device(self, stream: EngineStream, layout: BlockLayout) -> DeviceCopies | None:
        if not self._asked:
            self._asked = True
            self._address = int(layout.bases[0])
            self._copies = device_copies(stream, self._address, self._wish, self._on_fallback)
        return self._copies

"""The seam between the surface and how pages move: shared memory, or chunks over gRPC.

Implementations are thread-safe. Arguments are checked already (client/namespace.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.prompt import Prefix, Window
from kvwarehouse.client.regions import Regions
from kvwarehouse.types import Control, Namespace

if TYPE_CHECKING:
    from kvwarehouse import core


class Pinned(Protocol):
    """Pages held in DRAM until release()."""

    @property
    def pages(self) -> int: ...

    def release(self) -> None: ...


class Transport(Protocol):
    shares_memory: bool
    """Whether pages move through shared memory; a namespace opened must then show in it."""

    patient: bool
    """Whether calls that read may talk to a new daemon."""

    def opened(self, space: Namespace) -> bool:
        """Whether the daemon is known to have `space`. Finds a new daemon first if it must."""
        ...

    def sees(self, space: Namespace) -> bool:
        """Whether shared memory shows `space`, as it is mapped now. No call."""
        ...

    def refresh(self, timeout_s: float) -> bool:
        """Whether a daemon answers; finds a new one if it must."""
        ...

    def control(self) -> Control: ...

    def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        """Pages by tier: in HBM, in DRAM, only on NVMe."""
        ...

    def tiers(self, space: Namespace, prefix: Prefix, *, counted: bool) -> NDArray[np.uint8]:
        """A Tier for each page; `counted` as a lookup."""
        ...

    def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> tuple[int, dict[str, int]]:
        """Pages filled in order; reasons for the others."""
        ...

    def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> tuple[int, int, dict[str, int]]:
        """Pages stored, already there, and dropped by reason."""
        ...

    def pin(self, space: Namespace, prefix: Prefix, first: int, timeout_s: float) -> Pinned: ...

    def tags(self, space: Namespace, prefix: Prefix) -> NDArray[np.uint64]:
        """A word for each page, as good as its key for telling it from others."""
        ...

    def hold(
        self, space: Namespace, prefix: Prefix, window: Window, timeout_s: float
    ) -> core.Extents:
        """The pages of the window that are on NVMe, from its first on, held there."""
        ...

    def segments(self, timeout_s: float) -> str:
        """Where they are, as a path for any process of this user; "" where there are none."""
        ...

    def use_device(self, ordinal: int) -> None:
        """Loads the kernels onto a GPU, unless they are there, and takes the memory of one load or
        store. Blocks for a second the first time in a process."""
        ...

    def device_stage(self, ordinal: int, size_bytes: int) -> core.DeviceStage:
        """Memory of a GPU for held pages to land in."""
        ...

    def close(self) -> None: ...

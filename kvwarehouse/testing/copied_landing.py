"""Stages in a device's memory whose pages are verified and handed over in host memory: for tests
that ask whether a mover brings the right bytes to the device. Not a way to serve: every byte
crosses twice."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from kvwarehouse import engine
from kvwarehouse.client.regions import Regions


class CopiedLanding:
    def __init__(self, device: int, stage_bytes: int) -> None:
        self.stage_bytes = stage_bytes
        cupy = import_module("cupy")  # there is none where the tests that need it are skipped
        self._device = cupy.cuda.Device(device)
        with self._device:
            self._stages = [cupy.full(stage_bytes, 0xCD, cupy.uint8) for _ in range(2)]

    def part(self, turn: int, at_bytes: int, size_bytes: int) -> Any:
        return self._stages[turn][at_bytes : at_bytes + size_bytes]

    def deliver(
        self, turn: int, extents: engine.Extents, first: int, count: int, out: Regions
    ) -> int:
        with self._device:
            stage: Any = np.ascontiguousarray(self._stages[turn].get())
        return extents.deliver(stage, first, count, out.native())

"""Paths from NVMe to the device of the contract model, chosen without a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvwarehouse.gpu import Choice, LoadPath, Machine, Rates
from testkit.cuda_model import ModelDevice
from testkit.kvikio_model import KvikioModel

_GPU = Machine(cuda="13.0", devices=["H200"], kvikio="26.10", gds=True)


class Choosing:
    """In place of kvwarehouse.gpu.select_path; knows what it was asked."""

    def __init__(self, path: LoadPath) -> None:
        self.asked: list[Path] = []
        self.choice = Choice(path, "so it says", _GPU, Rates({path: 6e9}, {}, 1 << 30))

    def __call__(self, folder: Path, ordinal: int, *, among: Sequence[LoadPath]) -> Choice:
        assert list(folder.glob("*.seg")), "the daemon's segments"
        self.asked.append(folder)
        return self.choice


def kvikio_of(device: ModelDevice, change: Callable[[Any], None] | None = None) -> KvikioModel:
    """change: what happens to bytes on their way. Each read first waits for the default stream, as
    the library does, with the context of the thread that reads."""

    def write(target: Any, data: bytes) -> None:
        landed = np.frombuffer(data, np.uint8).copy()
        if change is not None:
            change(landed)
        device.wait_for_default_stream()
        device.poke(target.address, landed)

    return KvikioModel(write)

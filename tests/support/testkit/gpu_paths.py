"""Paths from NVMe to the device of the contract model, chosen without a measurement, and a contract
model of kvikio (26.10: CuFile's raw_read, defaults), so that files, futures and failures are tried
without a GPU. tests/integration/test_kvikio.py has the library, tests/gpu the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvwarehouse.gpu import Choice, LoadPath, Machine, Rates
from testkit.cuda_model import ModelDevice

_GPU = Machine(cuda="13.0", devices=["H200"], kvikio="26.10", gds=True)
_LONGEST_S = 120.0


class KvikioModel:
    """In place of the module: reads in the thread that calls, and is strict about handles."""

    CompatMode = SimpleNamespace(OFF="OFF", ON="ON", AUTO="AUTO")

    def __init__(self, write: Callable[[Any, bytes], None]) -> None:
        """write(target, data): what the device does with bytes that come for `target`."""
        self.settings: dict[str, Any] = {}
        self.defaults = SimpleNamespace(set=self.settings.update)
        self.open: list[Any] = []
        self.opened = 0
        self.reads = 0
        self.error: Exception | None = None
        self.short_bytes = 0
        self.answers = threading.Event()
        """Cleared: the device does not, and no read ends meanwhile."""
        self.answers.set()
        model = self

        class CuFile:
            def __init__(self, path: str, flags: str) -> None:
                assert flags == "r"
                self.fd: int | None = os.open(path, os.O_RDONLY)
                model.open.append(self)
                model.opened += 1

            def raw_read(self, buf: Any, size: int, file_offset: int = 0) -> int:
                assert self.fd is not None, "a closed handle was read from"
                model.reads += 1
                assert model.answers.wait(_LONGEST_S), "the device never answered"
                assert self.fd is not None, "closed while a transfer was under way"
                if model.error:
                    raise model.error
                write(buf, os.pread(self.fd, size, file_offset))
                return size - model.short_bytes

            def __enter__(self) -> CuFile:
                return self

            def __exit__(self, *how: object) -> None:
                self.close()

            def close(self) -> None:
                assert self.fd is not None, "closed twice"
                os.close(self.fd)
                self.fd = None
                model.open.remove(self)

        self.CuFile = CuFile


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

"""Loads into the memory of one device, each by the path that is the fastest on this machine.

Which that is is found out behind the loads' back, once there is something on NVMe to measure with;
until then, and wherever something is wrong with it, pages on NVMe come by the daemon's promotion.

    path = kvwarehouse.gpu.AutoPath(ordinal)
    filled = path.load(opened, tokens, out)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvwarehouse.client.namespace import OpenNamespace
from kvwarehouse.client.transport import shared_memory_of
from kvwarehouse.gpu.file_reader import KvikioReader
from kvwarehouse.gpu.nvme_reader import NvmeReader
from kvwarehouse.gpu.path_benchmark import LEAST_BYTES, LoadPath, written
from kvwarehouse.gpu.path_selection import Choice, select_path
from kvwarehouse.gpu.staging_area import DeviceStagingArea
from kvwarehouse.types import Loaded

_log = logging.getLogger(__name__)

_ASK_S = 1.0
_AGAIN_S = 60.0
"""Between two looks for something to measure with."""
_MOST_FAILURES = 8
_PATHS = (LoadPath.GDS, LoadPath.DRAM)
"""Not kvikio's own buffers: what copies from them are made on waits for the engine's default stream
and makes it wait."""


class AutoPath:
    """ordinal: the device, as CUDA counts them in this process. select, library: in place of
    kvwarehouse.gpu.select_path and of the module kvikio.

    For namespaces of one client. Takes 64 MiB of the device's memory where pages on NVMe are read
    past the daemon. What was read so once goes the daemon's way the next time, so that it comes
    into DRAM. Thread-safe."""

    def __init__(
        self, ordinal: int, *, select: Callable[..., Choice] = select_path, library: Any = None
    ) -> None:
        self._ordinal, self._select, self._library = ordinal, select, library
        self._lock = threading.Lock()
        self._choice: Choice | None = None
        self._reader: NvmeReader | None = None
        self._problem = ""
        self._looking = False
        self._look_at_s = 0.0

    @property
    def choice(self) -> Choice | None:
        """None until it was found out."""
        return self._choice

    @property
    def problem(self) -> str:
        """Why the path that was chosen is not used, or not any more; "" while it is."""
        return self._problem

    def load(self, opened: OpenNamespace, *args: Any, **how: Any) -> Loaded:
        """As opened.load, with the same arguments, promises and errors; `out` is in the device's
        memory."""
        reader = self._reader
        if reader is None:
            self._look(opened)
            return opened.load(*args, **how)
        loaded = reader.load(opened, *args, **how)
        if reader.failures_in_a_row >= _MOST_FAILURES:
            self._give_up("; ".join(reader.failures))
        return loaded

    def close(self) -> None:
        """Loads go the daemon's way from now on. Waits for none of them."""
        self._give_up("closed", logging.DEBUG)

    def _give_up(self, why: str, level: int = logging.WARNING) -> None:
        with self._lock:
            if self._problem:
                return
            self._problem = why
            reader, self._reader = self._reader, None
        _log.log(level, "pages on NVMe come by the daemon's promotion from now on: %s", why)
        if reader is not None:
            _begin(reader.close)  # which waits for a load that reads

    def _look(self, opened: OpenNamespace) -> None:
        """Behind the load's back, where it is time to."""
        with self._lock:
            settled = self._choice is not None or self._problem or self._looking
            if settled or time.monotonic() < self._look_at_s:
                return
            self._looking = True
        if not _begin(lambda: self._find(opened)):
            self._looking = False

    def _find(self, opened: OpenNamespace) -> None:
        """In a thread of its own."""
        try:
            segments = shared_memory_of(opened).segments(_ASK_S)
            if segments and _enough(Path(segments)):
                self._take(opened, self._select(Path(segments), self._ordinal, among=_PATHS))
        except Exception as error:  # noqa: BLE001 - whatever a vendor's library raises
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._look_at_s = time.monotonic() + _AGAIN_S
            self._looking = False

    def _take(self, opened: OpenNamespace, choice: Choice) -> None:
        if choice.machine.has_device and not choice.rates.bytes_per_s:
            return  # nothing could be measured: later, perhaps
        _log.info("NVMe to device %d by %s", self._ordinal, choice.in_short)
        self._choice = choice
        made = reader(opened, self._ordinal, choice, promotes=True, library=self._library)
        with self._lock:
            if not self._problem:
                self._reader, made = made, None
        if made is not None:
            made.close()


def reader(
    opened: OpenNamespace,
    ordinal: int,
    choice: Choice,
    *,
    promotes: bool = False,
    library: Any = None,
) -> NvmeReader | None:
    """Loads of pages on NVMe into the memory of device `ordinal`, by the way that was chosen, for
    namespaces of the client of `opened`; None where that is the daemon's promotion, which is what
    `opened.load` does. The caller closes it.
    promotes: as NvmeReader has it.

    library: in place of the module kvikio. Raises as DeviceStagingArea and KvikioReader."""
    if choice.path is LoadPath.DRAM:
        return None
    file_reader = KvikioReader(gds=choice.path is LoadPath.GDS, library=library)
    staging = DeviceStagingArea(opened, ordinal)
    return NvmeReader(file_reader, staging, promotes=promotes)


def _begin(work: Callable[[], None]) -> bool:
    """Whether there was a thread for it to be had."""
    try:
        threading.Thread(target=work, name="kvw-path", daemon=True).start()
    except RuntimeError:
        return False
    return True


def _enough(segments: Path) -> bool:
    return sum(size for _, _, size in written(segments, LEAST_BYTES)) >= LEAST_BYTES

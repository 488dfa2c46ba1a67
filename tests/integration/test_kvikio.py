"""The real kvikio, as far as it works without a device: it reads held extents of a real daemon from
its files, in its compatibility mode, into host memory that a stub in the driver's place has for a
device's. That bytes reach a device is tests/gpu's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.pages import pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit.cuda_model import build_driver_without_devices

PAGES, PAGE_BYTES = 40, 300_000

# In a process of its own: the driver's place is taken when the process starts.
READ = f"""
import sys
import numpy as np
import kvwarehouse as kvw
from kvwarehouse.gpu.staging_area import HostStagingArea
from kvwarehouse.gpu.nvme_reader import NvmeReader
from kvwarehouse.gpu.file_reader import KvikioReader
from kvwarehouse_bench.harness.pages import check_pages

class Memory:
    def __init__(self, part):
        self.part = part
        self.__cuda_array_interface__ = {{
            "shape": part.shape, "typestr": "|u1", "data": (part.ctypes.data, False), "version": 3
        }}

class StagingArea(HostStagingArea):
    def part(self, *place):
        return Memory(super().part(*place))

with kvw.connect(sys.argv[1]) as client:
    space = kvw.Namespace(model="m", weights="w", dtype="uint8", layout="test/1", page_tokens=4,
                          page_bytes={PAGE_BYTES})
    ns, file_reader = client.open(space), KvikioReader(gds=False)
    with NvmeReader(file_reader, StagingArea(4 << 20)) as reader:
        out = np.zeros(({PAGES}, {PAGE_BYTES}), np.uint8)
        loaded = reader.load(ns, np.arange({PAGES * 4}), out, timeout_s=60)
        check_pages(out[:int(loaded)], range(int(loaded)), 0, 0)
        print(int(loaded), reader.pages_read, reader.failures)
"""


@pytest.mark.skipif(
    find_spec("kvikio") is None,
    reason="kvikio asks for CuPy with all of CUDA: make setup-gpu installs it without",
)
def test_kvikio_reads_held_extents_of_a_daemon(tmp_path: Path) -> None:
    driver = build_driver_without_devices(tmp_path)
    if driver is None:
        pytest.skip("no C compiler for the stub in the driver's place")
    with Serving(tmp_path, dram="32MiB", nvme_capacity="64MiB") as serving:
        with serving.connect() as client:
            ns = client.open(
                kvw.Namespace(
                    model="m",
                    weights="w",
                    dtype="uint8",
                    layout="test/1",
                    page_tokens=4,
                    page_bytes=PAGE_BYTES,
                )
            )
            rows = pages_of(range(PAGES), 0, 0, PAGE_BYTES)
            assert ns.store(np.arange(PAGES * 4), rows, timeout_s=60).stored == PAGES
            assert client.flush().pending == 0
            client.evict(None, 100_000, "dram")
        ended = subprocess.run(
            [sys.executable, "-P", "-c", READ, serving.address],
            env={**os.environ, "LD_LIBRARY_PATH": str(driver.parent)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert ended.stdout.split()[:2] == [str(PAGES), str(PAGES)], ended.stdout + ended.stderr

"""What bench/gpu.py measures NVMe with is there, on the disk; the disk itself is measured by it."""

from __future__ import annotations

from pathlib import Path

from gpu_bench.nvme import fill
from kvwarehouse.gpu.rates import LEAST_BYTES, disk_rate, written
from kvwarehouse.testing.serving import Serving


def test_pages_for_the_measurement_reach_the_disk(tmp_path: Path) -> None:
    with Serving(tmp_path, dram="64MiB", nvme_capacity="256MiB") as serving:
        fill(serving, 32)
        segments = serving.nvme_dir / "segments"
        assert sum(size for _, _, size in written(segments)) >= 2 * LEAST_BYTES
        assert disk_rate(segments) > 0

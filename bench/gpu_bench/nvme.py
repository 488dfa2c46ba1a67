"""NVMe to a device, each way, beside the disk's own reads: on segments that a private daemon
wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kvwarehouse as kvw
from gpu_bench.wanted import Outcome
from kvwarehouse.cli.bench.figures import GIGABYTE, Figure
from kvwarehouse.gpu import Machine, Rates, measure
from kvwarehouse.gpu.rates import disk_rate
from kvwarehouse.testing.serving import Serving

NAME = "NVMe to GPU, against the disk's own reads"
_PAGE_BYTES = 2 << 20
_PAGE_TOKENS = 16


def nvme(machine: Machine, folder: Path, stored_bytes: int) -> Outcome:
    """Blocks for a few minutes at most."""
    if not machine.has_device:
        return Outcome("nvme", why_not=machine.words()[0])
    folder.mkdir(parents=True, exist_ok=True)
    with Serving(folder, dram="1GiB", nvme_capacity="8GiB") as serving:
        fill(serving, stored_bytes // _PAGE_BYTES)
        segments = serving.nvme_dir / "segments"
        return outcome_of(measure(segments), disk_rate(segments))


def outcome_of(rates: Rates, disk_bytes_per_s: float) -> Outcome:
    """The fastest way is judged; the others are shown."""
    if not rates.bytes_per_s or not disk_bytes_per_s:
        why = next(iter(rates.problems.values()), "the disk itself was not measured")
        return Outcome("nvme", why_not=why)
    ordered = sorted(rates.bytes_per_s.items(), key=lambda item: -item[1])
    rate = ordered[0][1]
    limit = disk_bytes_per_s / GIGABYTE
    figures = [Figure(NAME, rate / GIGABYTE, "GB/s", limit, "disk", "ratio 0.9 or more")]
    figures += [
        Figure(f"NVMe to GPU by {lane.value}", each / GIGABYTE, "GB/s", limit, "disk")
        for lane, each in ordered
    ]
    return Outcome("nvme", figures)


def fill(serving: Serving, pages: int) -> None:
    """Stores so many pages, all of them on NVMe when it returns."""
    space = kvw.Namespace(
        model="bench-gpu",
        weights="none",
        dtype="uint8",
        layout="bench/1",
        page_tokens=_PAGE_TOKENS,
        page_bytes=_PAGE_BYTES,
    )
    rows = np.random.default_rng(0).integers(0, 256, (16, _PAGE_BYTES), np.uint8)
    with serving.connect() as client:
        opened = client.open(space)
        for first in range(0, pages, len(rows)):
            ids = np.arange(len(rows) * _PAGE_TOKENS) + first * _PAGE_TOKENS
            stored = opened.store(ids, rows, timeout_s=60)
            if stored.stored < len(rows) or client.flush(120).pending:
                raise RuntimeError(f"the warehouse did not take all pages: {stored}")

"""NVMe to a device beside the disk's own reads, on segments that a private daemon wrote: verified
loads by the way that is the fastest here, and each way's bare transfers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse.gpu import Machine, Rates, reader, select_path
from kvwarehouse.gpu.driver import Driver
from kvwarehouse.gpu.path_benchmark import disk_rate
from kvwarehouse.gpu.path_benchmark_child import drop_cached
from kvwarehouse_bench.gpu.goals import PartOutcome
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.micro.figures import GIGABYTE, Figure

NAME = "NVMe to GPU, against the disk's own reads"
PAGE_BYTES = 2 << 20
_PAGE_TOKENS = 16
_STORED_AT_ONCE = 16
_LOADED_PAGES = 128
_ROUNDS = 5
_ALL_PAGES = 100_000  # the most that one call evicts, and more than there are
_WAIT_S = 120.0
_LEAST_CAPACITY = 512 << 20


def nvme(machine: Machine, folder: Path, stored_bytes: int) -> PartOutcome:
    """Blocks for a few minutes at most."""
    if not machine.has_device:
        return PartOutcome("nvme", why_not=machine.describe()[0])
    folder.mkdir(parents=True, exist_ok=True)
    tiers = {"dram": "1GiB", "nvme_capacity": str(max(_LEAST_CAPACITY, 2 * stored_bytes))}
    with Serving(folder, **tiers) as serving, serving.connect() as client:
        pages = stored_bytes // PAGE_BYTES
        opened = fill(client, pages)
        segments = serving.nvme_dir / "segments"
        # The machine was looked at already, which may take half a minute.
        choice = select_path(segments, memory=folder / "paths", again=True, probe=lambda: machine)
        disk = disk_rate(segments)
        driver = Driver()
        driver.use(0)
        loaded = min(pages, _LOADED_PAGES)
        address = driver.memory(loaded * PAGE_BYTES).address
        with reader(opened, 0, choice) or nullcontext() as past_daemon:
            load = partial(past_daemon.load, opened) if past_daemon else opened.load
            rate = load_rate(client, load, address, loaded, segments)
        return outcome_of(choice.rates, disk, rate, choice.path)


def load_rate(
    client: kvw.Client, load: Callable[..., kvw.Loaded], address: int, pages: int, segments: Path
) -> float:
    """Bytes a second of verified loads of pages that are on NVMe alone, into the device's memory at
    `address`: median over rounds, caches dropped before each."""
    blocks = [[block] for block in range(pages)]
    out = kvw.Regions.strided([], [address], [PAGE_BYTES], [PAGE_BYTES], blocks).on_device(0)
    taken = []
    for _ in range(1 + _ROUNDS):
        client.evict(None, _ALL_PAGES, "dram")
        drop_cached(segments.glob("*.seg"))
        began = time.perf_counter()
        filled = load(_tokens(pages), out, timeout_s=_WAIT_S)
        taken.append(time.perf_counter() - began)
        if filled != pages:
            raise RuntimeError(f"{int(filled)} of {pages} pages were loaded: {filled.missed}")
    return pages * PAGE_BYTES / statistics.median(taken[1:])


def outcome_of(rates: Rates, disk_bytes_per_s: float, bytes_per_s: float, path: str) -> PartOutcome:
    """Verified loads are judged; the bare transfers of each way are shown."""
    if not rates.bytes_per_s or not disk_bytes_per_s:
        why = next(iter(rates.problems.values()), "the disk itself was not measured")
        return PartOutcome("nvme", why_not=why)
    ordered = sorted(rates.bytes_per_s.items(), key=lambda item: -item[1])
    limit = disk_bytes_per_s / GIGABYTE
    figures = [
        Figure(NAME, bytes_per_s / GIGABYTE, "GB/s", limit, f"disk ({path})", "ratio 0.9 or more")
    ]
    figures += [
        Figure(
            f"NVMe to GPU, transfers alone, {each.value}", rate / GIGABYTE, "GB/s", limit, "disk"
        )
        for each, rate in ordered
    ]
    return PartOutcome("nvme", figures)


def fill(client: kvw.Client, pages: int) -> kvw.OpenNamespace:
    """Stores one prompt of so many pages, all of them on NVMe when it returns."""
    opened = client.open(
        kvw.Namespace(
            model="bench-gpu",
            weights="none",
            dtype="uint8",
            layout="bench/1",
            page_tokens=_PAGE_TOKENS,
            page_bytes=PAGE_BYTES,
        )
    )
    rows = np.random.default_rng(0).integers(0, 256, (_STORED_AT_ONCE, PAGE_BYTES), np.uint8)
    for first in range(0, pages, len(rows)):
        some = rows[: pages - first]
        stored = opened.store(_tokens(first + len(some)), some, first=first, timeout_s=60)
        if stored.stored < len(some) or client.flush(_WAIT_S).pending:
            raise RuntimeError(f"the warehouse did not take all pages: {stored}")
    return opened


def _tokens(pages: int) -> Any:
    return np.arange(pages * _PAGE_TOKENS)

"""The measure of pinned copies, over the contract model of CUDA's driver: what it moves is whole,
and what it says can be judged. Its figures mean nothing here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse_bench.gpu import hbm
from kvwarehouse_bench.gpu.device_pages import Memory
from kvwarehouse_bench.gpu.goals import DIGEST, FROM_GPU, HBM, TO_GPU
from kvwarehouse_bench.gpu.pinned import PinnedWork, outcome_of, pinned
from kvwarehouse_bench.micro.figures import Figure
from testkit.cuda_model import ModelDevice, environment


class ModelCard:
    def __init__(self, folder: Path) -> None:
        self.device = ModelDevice(folder)
        self.copies: list[bool] = []
        self.within: list[str] = []

    def memory(self, size_bytes: int) -> Memory:
        data = np.random.default_rng(1).integers(0, 256, (1, size_bytes), np.uint8)
        array = self.device.array(data)
        return Memory(array, array.address, size_bytes)

    def pinned(self, size_bytes: int) -> Any:
        return (ctypes.c_uint8 * size_bytes)()

    def copy(self, memory: Memory, pinned: Any, *, to_device: bool) -> None:
        self.copies.append(to_device)

    def copy_within(self, to: Memory, source: Memory) -> None:
        self.within.append("copy")

    def scatter_within(self, to: Memory, source: Memory, block_bytes: int, order: Any) -> None:
        self.within.append("scatter")


@pytest.fixture(scope="module")
def card(cuda_driver: Path) -> ModelCard:
    return ModelCard(cuda_driver)


def test_pages_go_to_the_device_and_back_in_turns_with_large_copies(
    card: ModelCard, tmp_path: Path
) -> None:
    work = PinnedWork(2 << 20, (64 << 10, 256 << 10), rounds=2)
    outcome = pinned(card, tmp_path, work)
    figures = {figure.name: figure for figure in outcome.figures}
    assert set(figures) == {
        TO_GPU,
        FROM_GPU,
        *(
            f"{way}, pages of {size} KiB"
            for way in ("pinned DRAM to GPU", "GPU to pinned DRAM")
            for size in (64, 256)
        ),
    }
    assert all(figure.value > 0 for figure in outcome.figures)
    # A warm-up and the rounds, of each size and each way.
    assert sorted(card.copies) == [False] * 6 + [True] * 6


def test_pages_come_from_hbm_in_turns_with_copies_in_the_device(
    card: ModelCard, tmp_path: Path, cuda_driver: Path
) -> None:
    work = hbm.HbmWork(2 << 20, (64 << 10, 256 << 10), rounds=2)
    given = environment(cuda_driver)
    figures = {figure.name: figure for figure in hbm.hbm(card, tmp_path, work, given).figures}
    sizes = {f"HBM to the same GPU, pages of {size} KiB" for size in (64, 256)}
    assert set(figures) == {HBM, DIGEST, *sizes}
    assert all(figures[name].value > 0 for name in sizes)
    assert card.within.count("copy") == card.within.count("scatter") == 6


def test_the_slowest_size_is_judged() -> None:
    to_gpu = [Figure(f"size {n}", 9.0, "GB/s", 10.0, "", ratio_of_rounds=n) for n in (0.95, 0.7)]
    from_gpu = [Figure("size", 9.5, "GB/s", 10.0, "", ratio_of_rounds=0.92)]
    found = {figure.name: figure for figure in outcome_of(to_gpu, from_gpu).figures}
    assert (found[TO_GPU].verdict, found[TO_GPU].ratio) == ("missed", 0.7)
    assert found[FROM_GPU].verdict == "met"

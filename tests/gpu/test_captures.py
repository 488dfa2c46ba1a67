"""Loads and stores beside a CUDA graph that the engine captures: neither breaks the other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from kvwarehouse_bench.harness.serving import Serving
from testkit.device_suite import PAGES, SPACE, noise, prompt
from testkit.gpu_devices import TorchDevice


def test_graph_is_captured_whole_while_pages_come_and_go(
    torch_device: TorchDevice, tmp_path: Path
) -> None:
    import torch

    stored = torch_device.array(noise(1))
    other, loaded = torch_device.array(noise(2)), torch_device.array(np.zeros_like(noise(1)))
    x = torch.zeros(1 << 20, device="cuda")
    y = (x + 1) * 2  # what is compiled and taken at first use is no part of the graph
    torch.cuda.synchronize()
    answers: list[Any] = []
    with Serving(tmp_path, dram="64MiB") as serving, serving.connect(timeout_s=60) as client:
        ns = client.open(SPACE)
        assert ns.store(prompt(1), stored).stored == PAGES

        def beside() -> None:
            for number in range(2, 12):
                answers.append(ns.store(prompt(number), other).stored)
                answers.append(int(ns.load(prompt(1), loaded)))

        graph = torch.cuda.CUDAGraph()
        thread = threading.Thread(target=beside)
        with torch.cuda.graph(graph):
            y = x + 1
            thread.start()
            thread.join()
            y = y * 2
        graph.replay()
        torch.cuda.synchronize()
    assert answers == [PAGES] * 20
    assert bool((y == 2).all())
    assert np.array_equal(torch_device.read(loaded), noise(1))

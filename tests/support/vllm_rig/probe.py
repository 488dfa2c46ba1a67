"""Runs in each worker, beside vLLM's own methods: looks at, and spoils, the cache's memory. For
engines with the option `worker_extension_cls` = Probe's path (PROBE)."""

from __future__ import annotations

import hashlib
from typing import Any

PROBE = "vllm_rig.probe.Probe"
SPOILT = 3.0
"""What blocks that nobody uses are filled with. Else a load that does not come is not noticed: the
blocks may be those that held the same prompt before."""


class Probe:
    """Names begin with `rig_`: they must meet none of the worker's."""

    def rig_shapes(self) -> list[list[int]]:
        """Of each layer's view of the cache: blocks first."""
        return [list(view.shape) for view in self._rig_caches()]

    def rig_fill_all(self, value: float | str) -> None:
        """All keys and values of every block become `value`."""
        for view in self._rig_caches():
            view.fill_(float(value))

    def rig_take_stages(self) -> None:
        """vLLM's runner for the CPU makes the buffer between pipeline stages only while it
        compiles, and dies without it."""
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )

    def rig_digests(self, blocks: list[int]) -> list[str]:
        """A digest over all layers for each block: equal where the bytes are."""
        import torch

        found = []
        for block in blocks:
            digest = hashlib.blake2b(digest_size=16)
            for view in self._rig_caches():
                page = view[block].contiguous().flatten().view(torch.uint8)
                digest.update(page.numpy().tobytes())
            found.append(digest.hexdigest())
        return found

    def _rig_caches(self) -> list[Any]:
        return [view for view in self.model_runner.kv_caches if view is not None]  # type: ignore[attr-defined]

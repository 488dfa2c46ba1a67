"""How much memory stores take where no setting says it. That a step fits it is tested beside the
planner, in tests/engines/vllm/parts."""

from __future__ import annotations

from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.vllm.staging import (
    LEAST_BYTES,
    MOST_BYTES,
    needed_bytes,
    usual_bytes,
)

FULL = CacheGroup(0, Rule.PREFIX, 16, 0, 16, ("a",))
WINDOW = CacheGroup(1, Rule.WINDOW, 16, 128, 16, ("b",))
GPU_BYTES = 80 << 30
MIB = 1 << 20


def test_two_steps_of_full_attention_and_ends_of_windows_are_needed() -> None:
    assert needed_bytes([FULL], [2 * MIB], 8192) == 2 * 512 * 2 * MIB
    windows = needed_bytes([FULL, WINDOW], [MIB, MIB], 8192) - needed_bytes([FULL], [MIB], 8192)
    assert 2 * 8 * MIB <= windows <= 2 * 10 * MIB


def test_memory_is_what_is_needed_within_its_bounds() -> None:
    assert usual_bytes(1 << 30, GPU_BYTES) == 1 << 30
    assert usual_bytes(1, GPU_BYTES) == LEAST_BYTES
    assert usual_bytes(1 << 40, GPU_BYTES) == MOST_BYTES
    assert usual_bytes(1 << 40, 81_079 * MIB) == MOST_BYTES  # an H100 of 80 GB
    assert usual_bytes(1 << 40, 24 << 30) < 1 << 30
    assert usual_bytes(1 << 40, 1 << 30) == LEAST_BYTES

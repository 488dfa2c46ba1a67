"""Engines of other models than the llama of most tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_rig.bay import Bay
from vllm_rig.checkpoints import Checkpoints
from vllm_rig.engine import Engine
from vllm_rig.options import engine_options
from vllm_rig.pair import Pair

Start = Callable[..., Pair]


@pytest.fixture
def start_model(start: Start, checkpoints: Checkpoints) -> Start:
    """start_model(shape, settings={...}, **options): as `start`, of another model."""

    def started(shape: str, settings: dict[str, Any] | None = None, **options: Any) -> Pair:
        pair = start(settings, model=str(checkpoints.get(shape)), **options)
        pair.engine.forget()
        return pair

    return started


@pytest.fixture
def plain_model(bay: Bay, checkpoints: Checkpoints) -> Callable[..., Engine]:
    """plain_model(shape, **options): vLLM as it is, without a connector."""

    def started(shape: str, **options: Any) -> Engine:
        engine: Engine = bay.get(Engine, engine_options(checkpoints.get(shape), **options))
        engine.forget()
        return engine

    return started

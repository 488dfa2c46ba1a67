"""Engines that cannot be served, refused by name at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm.scheduler import SchedulerSide
from kvwarehouse_connectors.vllm.settings import read_settings
from vllm_parts.halves import Engine, engine_config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), "pipeline"),
        (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), "context"),
        (lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2), "context"),
        (lambda c: setattr(c.model_config, "is_encoder_decoder", True), "encoder-decoder"),
        (lambda c: setattr(c.load_config, "load_format", "dummy"), "dummy"),
        (lambda c: setattr(c.model_config, "model", "no/such-model"), "no/such-model"),
    ],
)
def test_engine_that_cannot_be_served_is_refused_by_name(
    change: Callable[[Any], None], words: str, engine: Engine
) -> None:
    config = engine_config(["a", "b"], revision=None)
    config.load_config.download_dir = None
    change(config)
    with pytest.raises(kvw.UsageError, match=words):
        SchedulerSide(config, engine.caches[0].config, read_settings({}, "kv_both"))

"""Starting an engine: what refuses it, and what must not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_rig.bay import Bay
from vllm_rig.compare import BFLOAT16_TOLERANCE, assert_same
from vllm_rig.daemon import Daemon
from vllm_rig.engine import Engine
from vllm_rig.messages import Ask
from vllm_rig.options import engine_options, transfer_config
from vllm_rig.pair import Pair, hit, prompt
from vllm_rig.process import StartError
from vllm_rig.stored_pages import StoredPages

Start = Callable[..., Pair]


LOADING = "Starting to load model"
"""What an engine's log says before anything of the model is read."""


def refusal(start: Start, settings: dict[str, object], **options: object) -> str:
    """The log of an engine that does not start: what it says before it loads its model."""
    with pytest.raises(StartError) as refused:
        start(settings=settings, **options)
    assert LOADING not in refused.value.log
    return refused.value.log


def test_engine_that_starts_says_that_it_loads_its_model(pair: Pair) -> None:
    """Else the other tests look for nothing."""
    assert LOADING in pair.engine.group.text()


def test_engine_whose_weights_are_in_no_file_is_refused_before_it_makes_them(start: Start) -> None:
    said = refusal(start, {}, load_format="dummy")
    assert "UsageError: kvwarehouse cannot fingerprint the weights: load_format is dummy" in said


@pytest.mark.slow_engine
def test_engine_refuses_to_start_when_a_failed_load_would_fail_its_request(start: Start) -> None:
    said = refusal(start, {"kv_load_failure_policy": "fail"})
    assert "kv_load_failure_policy" in said
    assert '"kv_load_failure_policy": "recompute"' in said


@pytest.mark.slow_engine
@pytest.mark.parametrize(
    ("name", "value"),
    [("mod", "read_only"), ("mode", "readonly"), ("staging_bytes", -1), ("load_timeout_s", "5 s")],
)
def test_engine_refuses_to_start_when_a_setting_is_bad(
    start: Start, name: str, value: object
) -> None:
    said = refusal(start, {name: value})
    assert f"kvwarehouse.{name}" in said


@pytest.mark.slow_engine
def test_engine_starts_and_serves_when_the_daemon_comes_later(
    bay: Bay, checkpoint: Path, tmp_path: Path, rng: random.Random
) -> None:
    """In bfloat16, as models are served."""
    late = Daemon(tmp_path, dram="64MiB", grace_s="0.1")
    transfer = transfer_config(late.address)
    options = engine_options(checkpoint, dtype="bfloat16", kv_transfer_config=transfer)
    try:
        engine: Engine = bay.get(Engine, options)
        ask = Ask(prompt(rng, 300))
        alone = engine.ask(ask)
        engine.forget()
        late.start()
        with StoredPages(late) as stored_pages:
            pair = Pair(engine, late, stored_pages)
            pair.connected(rng)
            pair.engine.forget()
            (cold,) = pair.stored(ask)
            warm = pair.reloaded(ask)
        assert warm.cached == hit(ask)
        assert_same(alone, cold, BFLOAT16_TOLERANCE)
        assert_same(cold, warm, BFLOAT16_TOLERANCE)
    finally:
        bay.empty()
        late.remove()

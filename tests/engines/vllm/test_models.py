"""Every kind of model that the connector is tested on runs in vLLM as it is, on this machine: a
test of the connector that fails with one of these has found something."""

from __future__ import annotations

import random

import pytest

from vllm_rig import adapters
from vllm_rig.bay import Bay
from vllm_rig.checkpoints import SHAPES, Checkpoints
from vllm_rig.compare import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE, assert_same, difference
from vllm_rig.engine import Engine
from vllm_rig.messages import Ask
from vllm_rig.options import engine_options
from vllm_rig.pair import prompt

pytestmark = pytest.mark.slow_engine

# vLLM turns its own prefix cache off for the first on the CPU, and keeps too few states of the
# second by default to find this prompt again.
UNCACHED = {"deepseek3", "qwen3-next"}
# Their kernels for the CPU take no float32, and vLLM chooses the size of their blocks.
PARTICULAR = {"deepseek3", "qwen3-next"}


@pytest.mark.parametrize("shape", SHAPES)
def test_model_computes_the_same_twice(
    bay: Bay, checkpoints: Checkpoints, rng: random.Random, shape: str
) -> None:
    options = engine_options(checkpoints.get(shape))
    tolerance = FLOAT32_TOLERANCE
    if shape in PARTICULAR:
        options["dtype"], tolerance = "bfloat16", BFLOAT16_TOLERANCE
        del options["block_size"]
    engine: Engine = bay.get(Engine, options)
    ask = Ask(prompt(rng, 400))
    first = engine.ask(ask)
    if shape not in UNCACHED:
        assert engine.ask(ask).cached > 0
    engine.forget()
    assert_same(first, engine.ask(ask), tolerance)


def test_model_of_two_ranks_computes_what_one_does(
    bay: Bay, checkpoints: Checkpoints, rng: random.Random
) -> None:
    asks = [Ask(prompt(rng, 200)) for _ in range(3)]
    answers = []
    for ranks in (1, 2):
        options = engine_options(checkpoints.get(), tensor_parallel_size=ranks)
        engine: Engine = bay.get(Engine, options)
        answers.append(engine.generate(asks))
    for one, other in zip(*answers, strict=True):
        assert_same(one, other)


def test_adapter_changes_what_a_model_says(
    bay: Bay, checkpoints: Checkpoints, rng: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = checkpoints.get()
    folder = tmp_path_factory.mktemp("adapters")
    one, other = (adapters.write(folder / str(seed), checkpoint, seed) for seed in (1, 2))
    options = engine_options(checkpoint, enable_lora=True, max_loras=2, max_lora_rank=8)
    engine: Engine = bay.get(Engine, options)
    tokens = prompt(rng, 200)
    plain = engine.ask(Ask(tokens))
    first = engine.ask(Ask(tokens, lora=("one", str(one))))
    second = engine.ask(Ask(tokens, lora=("other", str(other))))
    assert difference(plain, first)
    assert difference(first, second)
    again = engine.ask(Ask(tokens, lora=("one", str(one))))
    assert again.cached > 0
    assert_same(first, again)

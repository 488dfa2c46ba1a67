"""Time to first token through the transformers connector: recomputed, from DRAM, from NVMe, in
turns.

The model is a Llama with random weights, made on the device: what a prompt costs depends on shapes
alone. Runs on the CPU too, with a small shape, to see that it works."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvwarehouse as kvw
from gpu_bench.wanted import Outcome
from kvwarehouse.cli.bench.figures import Figure
from kvwarehouse.testing.serving import Serving

JUDGED_TOKENS = 32 << 10
NAME = "first token at 32k tokens from DRAM, against recomputing"
_TAIL_TOKENS = 9
"""Prompts of users end inside a page."""
_COMPUTED_TOKENS = 512
"""At most, after a load: the connector's last chunk."""
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """In bfloat16."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 2


SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8, 128_256),
    "tiny": Shape(2, 128, 256, 4, 2, 512),
}


@dataclass(frozen=True)
class Sample:
    """Seconds of each round."""

    tokens: int
    recomputed_s: Sequence[float]
    dram_s: Sequence[float]
    nvme_s: Sequence[float]

    def ratio(self, tier_s: Sequence[float]) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.recomputed_s, tier_s, strict=True))


def figures_of(samples: Sequence[Sample]) -> list[Figure]:
    figures = []
    for sample in samples:
        recomputed = statistics.median(sample.recomputed_s)
        for tier, seconds in (("DRAM", sample.dram_s), ("NVMe", sample.nvme_s)):
            judged = sample.tokens == JUDGED_TOKENS and tier == "DRAM"
            figures.append(
                Figure(
                    NAME if judged else f"first token at {sample.tokens} tokens from {tier}",
                    statistics.median(seconds),
                    "s",
                    recomputed,
                    "recomputed",
                    "ratio 20 or more" if judged else "",
                    sample.ratio(seconds),
                )
            )
    return figures


def ttft(device: str, shape: Shape, lengths: Sequence[int], rounds: int, folder: Path) -> Outcome:
    """Lengths that do not fit the device's memory are left out, and the last says so."""
    import torch

    model = _model(shape, max(lengths) + _TAIL_TOKENS + 1, device)
    room = str(tier_bytes(max(lengths), shape.kv_bytes_per_token))
    folder.mkdir(parents=True, exist_ok=True)
    samples: list[Sample] = []
    why = ""
    with Serving(folder, dram=room, nvme_capacity=room) as serving:
        for tokens in lengths:
            try:
                samples.append(_sample(serving, model, shape, tokens, rounds))
            except torch.OutOfMemoryError:
                why = f"{tokens} tokens and more do not fit the device's memory"
                break
    return Outcome("ttft", figures_of(samples), why)


def tier_bytes(tokens: int, kv_bytes_per_token: int) -> int:
    """Of each tier: one prompt at a time, with room for the one before it, which is being
    cleared."""
    return max(64 << 20, int(2.5 * (tokens + _TAIL_TOKENS) * kv_bytes_per_token))


def _model(shape: Shape, longest: int, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=longest,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(kept)


def _sample(serving: Serving, model: Any, shape: Shape, tokens: int, rounds: int) -> Sample:
    from kvwarehouse_connectors.transformers import PrefillOptions, WarehousePrefill

    options = PrefillOptions(load_timeout_s=_PATIENCE_S, store_timeout_s=_PATIENCE_S)
    seconds: dict[str, list[float]] = {"recomputed": [], "dram": [], "nvme": []}
    weights = kvw.fingerprint(f"bench-gpu@{shape}")
    with (
        serving.connect() as client,
        WarehousePrefill(model, client, weights=weights, options=options) as prefill,
    ):
        for prompt in _prompts(shape, tokens, rounds + 1):
            _one(prefill, prompt, False)  # warms up, for this length
            took = {"recomputed": _one(prefill, prompt, False)}
            prefill.prefill(prompt)
            prefill.flush(_PATIENCE_S)
            took["dram"] = _one(prefill, prompt, True)
            if client.flush(_PATIENCE_S).pending:
                raise RuntimeError("the NVMe tier did not take the prompt within ten minutes")
            client.evict(None, 100_000, "dram")
            took["nvme"] = _one(prefill, prompt, True)
            for side, each in took.items():
                seconds[side].append(each)
            client.clear(prefill.space)
    # The first round warms up.
    return Sample(tokens, *(tuple(seconds[side][1:]) for side in ("recomputed", "dram", "nvme")))


def _one(prefill: Any, prompt: Any, loaded: bool) -> float:
    """Seconds to the first token. Raises RuntimeError where the prompt did not come from where it
    should have: such a time would be somebody else's figure."""
    result = prefill.prefill(prompt, store=False)
    tokens = prompt.shape[-1]
    if not (tokens - _COMPUTED_TOKENS <= result.tokens_loaded) == loaded:
        raise RuntimeError(f"{result.tokens_loaded} of {tokens} tokens were loaded: {result.reuse}")
    return float(result.total_s)


def _prompts(shape: Shape, tokens: int, count: int) -> Iterator[Any]:
    import torch

    numbers = torch.Generator().manual_seed(tokens)
    for _ in range(count):
        yield torch.randint(shape.vocabulary, (1, tokens + _TAIL_TOKENS), generator=numbers)

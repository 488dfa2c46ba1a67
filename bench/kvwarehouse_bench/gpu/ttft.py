"""Time to first token through the transformers connector: recomputed, from DRAM, from HBM, from
NVMe, in turns.

The model is a Llama with random weights, made on the device: what a prompt costs depends on shapes
alone. Runs on the CPU too, with a small shape, to see that it works."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_bench.gpu.goals import PartOutcome
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_bench.micro.figures import Figure

JUDGED_TOKENS = 32 << 10
NAME = "first token at 32k tokens from DRAM, against recomputing"
_TAIL_TOKENS = 9
"""Prompts of users end inside a page."""
_COMPUTED_TOKENS = 512
"""At most, after a load: the connector's last chunk."""
_PATIENCE_S = 600.0
_TIERS = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe"}
_POOL_SHARE = 3
"""Of the memory that the model leaves: the pool, the cache that is filled from it, and the rest."""


@dataclass(frozen=True)
class TtftShape:
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
    "8b": TtftShape(32, 4096, 14336, 32, 8, 128_256),
    "tiny": TtftShape(2, 128, 256, 4, 2, 512),
}


@dataclass(frozen=True)
class GpuTtftSample:
    """Seconds of each round."""

    tokens: int
    recomputed_s: Sequence[float]
    tiers_s: Mapping[str, Sequence[float]]
    """Of the tiers that had room for the prompt."""

    def ratio(self, tier_s: Sequence[float]) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.recomputed_s, tier_s, strict=True))


def figures_of(samples: Sequence[GpuTtftSample]) -> list[Figure]:
    figures = []
    for sample in samples:
        recomputed = statistics.median(sample.recomputed_s)
        for tier, name in _TIERS.items():
            if tier not in sample.tiers_s:
                continue
            seconds = sample.tiers_s[tier]
            judged = sample.tokens == JUDGED_TOKENS and tier == "dram"
            figures.append(
                Figure(
                    NAME if judged else f"first token at {sample.tokens} tokens from {name}",
                    statistics.median(seconds),
                    "s",
                    recomputed,
                    "recomputed",
                    "ratio 20 or more" if judged else "",
                    sample.ratio(seconds),
                )
            )
    return figures


def ttft(
    device: str, shape: TtftShape, lengths: Sequence[int], rounds: int, folder: Path
) -> PartOutcome:
    """Lengths that do not fit the device's memory, or its share for the HBM tier, are left out, and
    the outcome says so."""
    import torch

    model = _model(shape, max(lengths) + _TAIL_TOKENS + 1, device)
    room = str(tier_bytes(max(lengths), shape.kv_bytes_per_token))
    free = 0 if device == "cpu" else int(torch.cuda.mem_get_info()[0])
    pool = pool_bytes(lengths, shape.kv_bytes_per_token, free)
    folder.mkdir(parents=True, exist_ok=True)
    samples: list[GpuTtftSample] = []
    left_out: list[str] = []
    tiers = {"dram": room, "nvme_capacity": room} | ({"hbm": str(pool)} if pool else {})
    with Serving(folder, **tiers) as serving:
        problem = _pool_problem(serving) if pool else "too little memory beside the model"
        if problem and device != "cpu":
            left_out.append(f"nothing from HBM: {problem}")
            pool = 0
        for tokens in lengths:
            work = _Work(shape, tokens, rounds, pool >= hbm_bytes(tokens, shape.kv_bytes_per_token))
            try:
                samples.append(_sample(serving, model, work))
            except torch.OutOfMemoryError:
                left_out.append(f"{tokens} tokens and more do not fit the device's memory")
                break
            if pool and not work.from_hbm:
                left_out.append(f"{tokens} tokens do not fit the HBM tier of {pool >> 20} MiB")
    return PartOutcome("ttft", figures_of(samples), "; ".join(left_out))


def tier_bytes(tokens: int, kv_bytes_per_token: int) -> int:
    """Of each tier: one prompt at a time, with room for the one before it, which is being
    cleared."""
    return max(64 << 20, int(2.5 * (tokens + _TAIL_TOKENS) * kv_bytes_per_token))


def hbm_bytes(tokens: int, kv_bytes_per_token: int) -> int:
    """Of a pool that takes a prompt: pages of several sizes would share it, so with room to
    spare."""
    return int(1.25 * (tokens + _TAIL_TOKENS) * kv_bytes_per_token)


def pool_bytes(lengths: Sequence[int], kv_bytes_per_token: int, free_bytes: int) -> int:
    """Of the HBM tier: for the longest prompt for which its share of the free memory is enough; 0
    where that is none."""
    sizes = [hbm_bytes(tokens, kv_bytes_per_token) for tokens in lengths]
    return max((size for size in sizes if _POOL_SHARE * size <= free_bytes), default=0)


def _pool_problem(serving: Serving) -> str:
    """Waits for the HBM tier; why there is none, or nothing."""
    with serving.connect() as client:

        def told() -> Any:
            tier = client.status()["core"]["tiers"]["hbm"]
            return tier if tier["health"] != "starting" else None

        tier = eventually(told, "the HBM tier is there, or not")
        return "" if tier["health"] == "ok" else f"{tier['health']}: {tier['reason']}"


def _model(shape: TtftShape, longest: int, device: str) -> Any:
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


@dataclass(frozen=True)
class _Work:
    shape: TtftShape
    tokens: int
    rounds: int
    from_hbm: bool


def _sample(serving: Serving, model: Any, work: _Work) -> GpuTtftSample:
    from kvwarehouse_connectors.transformers import PrefillOptions, WarehousePrefill

    options = PrefillOptions(load_timeout_s=_PATIENCE_S, store_timeout_s=_PATIENCE_S)
    found: list[dict[str, float]] = []
    weights = kvw.fingerprint(f"bench-gpu@{work.shape}")
    with (
        serving.connect() as client,
        WarehousePrefill(model, client, weights=weights, options=options) as prefill,
    ):
        for prompt in _prompts(work):
            _one(prefill, prompt)  # warms up, for this length
            took = {"recomputed": _one(prefill, prompt)}
            prefill.prefill(prompt)
            prefill.flush(_PATIENCE_S)
            took["dram"] = _one(prefill, prompt, "dram")
            if work.from_hbm:
                _promote(prefill, prompt)
                took["hbm"] = _one(prefill, prompt, "hbm")
            if client.flush(_PATIENCE_S).pending:
                raise RuntimeError("the NVMe tier did not take the prompt within ten minutes")
            client.evict(None, 100_000, "dram")
            took["nvme"] = _one(prefill, prompt, "nvme")
            found.append(took)
            client.clear(prefill.space)
    # The first round warms up.
    seconds = {side: tuple(took[side] for took in found[1:]) for side in found[0]}
    return GpuTtftSample(work.tokens, seconds.pop("recomputed"), seconds)


def _promote(prefill: Any, prompt: Any) -> None:
    """Loads the prompt until the HBM tier has all of it: it takes what is used again, behind the
    loads' back."""

    def promoted() -> bool:
        by_tier = prefill.prefill(prompt, store=False).reuse.pages_by_tier
        return bool(by_tier["hbm"] == sum(by_tier.values()))

    eventually(promoted, "the HBM tier has the prompt", deadline_s=_PATIENCE_S)


def _one(prefill: Any, prompt: Any, tier: str = "") -> float:
    """Seconds to the first token of a prompt that is in `tier`; in none: it is computed. Raises
    RuntimeError where the prompt did not come from where it should have: such a time would be
    somebody else's figure."""
    result = prefill.prefill(prompt, store=False)
    tokens = prompt.shape[-1]
    loaded = tokens - _COMPUTED_TOKENS <= result.tokens_loaded
    by_tier = result.reuse.pages_by_tier
    if loaded != bool(tier) or (tier and by_tier[tier] < sum(by_tier.values())):
        raise RuntimeError(
            f"{result.tokens_loaded} of {tokens} tokens were loaded, which were to come from"
            f" {tier or 'nowhere'}: {result.reuse}"
        )
    return float(result.total_s)


def _prompts(work: _Work) -> Iterator[Any]:
    """One more than the rounds that count."""
    import torch

    numbers = torch.Generator().manual_seed(work.tokens)
    for _ in range(work.rounds + 1):
        yield torch.randint(
            work.shape.vocabulary, (1, work.tokens + _TAIL_TOKENS), generator=numbers
        )

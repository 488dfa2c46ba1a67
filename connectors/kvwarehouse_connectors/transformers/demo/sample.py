"""One question, asked and timed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from kvwarehouse_connectors.transformers import PrefillResult, Reuse, WarehousePrefill
from kvwarehouse_connectors.transformers.support import with_cache


@dataclass(frozen=True)
class Sample:
    """first_token_s: from the ids to the logits of the answer's first token. digest: of all keys
    and values of the prompt."""

    first_token_s: float
    reuse: Reuse
    logits: torch.Tensor
    digest: str
    answer: tuple[int, ...]

    def same_logits(self, other: Sample) -> bool:
        """Bit for bit: a NaN equals itself, and 0.0 is not -0.0."""
        return bool(torch.equal(_bits(self.logits), _bits(other.logits)))


def ask(prefiller: WarehousePrefill, model: Any, ids: list[int], answer_tokens: int) -> Sample:
    """Asks without storing the question, so that no other question finds more than the document."""
    return finish(model, ids, prefiller.prefill(ids, store=False), answer_tokens)


def finish(model: Any, ids: list[int], result: PrefillResult, answer_tokens: int) -> Sample:
    """Generates the answer to a prompt that was prefilled; its first token is there already."""
    digest = _digest(result)
    logits = result.logits.clone()
    if answer_tokens == 1:
        first = tuple(result.next_token[0].tolist())
        return Sample(result.total_s, result.reuse, logits, digest, first)
    tokens = torch.tensor([ids], device=result.next_token.device)
    with_first = torch.cat([tokens, result.next_token], dim=1)
    generated = model.generate(
        with_first,
        attention_mask=torch.ones_like(with_first),
        max_new_tokens=answer_tokens - 1,
        do_sample=False,
        pad_token_id=0,
        **with_cache(model, result.cache),
    )
    answer = tuple(generated[0, len(ids) :].tolist())
    return Sample(result.total_s, result.reuse, logits, digest, answer)


def _digest(result: PrefillResult) -> str:
    state = hashlib.sha256()
    for layer in result.cache.layers:
        for tensor in (layer.keys, layer.values):
            state.update(_bits(tensor).numpy())
    return state.hexdigest()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous().view(torch.uint8)

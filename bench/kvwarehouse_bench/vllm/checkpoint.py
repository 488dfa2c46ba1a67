"""Llamas with random weights, made on the spot: nothing is downloaded.

What a prompt costs depends on shapes alone, so random weights measure as well as trained ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

HEAD_SIZE = 64
BLOCK_TOKENS = 32
"""A CPU's attention wants a multiple of 32."""
TAIL_TOKENS = 9
"""Prompts of users end inside a block: so many tokens behind the whole ones."""
_BEGIN, _END = 1, 2
_FIRST_WORD = 3


@dataclass(frozen=True)
class ModelShape:
    layers: int
    heads: int
    kv_heads: int
    inner_size: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """In bfloat16."""
        return self.layers * self.kv_heads * HEAD_SIZE * 2 * 2

    @property
    def block_bytes(self) -> int:
        return self.kv_bytes_per_token * BLOCK_TOKENS

    @property
    def words(self) -> range:
        """Token ids that are words: no begin, no end."""
        return range(_FIRST_WORD, self.vocabulary)

    def prompt(self, tokens: int, numbers_of_run: Random) -> list[int]:
        """One that nobody has asked before."""
        return numbers_of_run.choices(self.words, k=tokens)


SHAPES = {
    "80m": ModelShape(layers=12, heads=12, kv_heads=4, inner_size=2048, vocabulary=8192),
    "tiny": ModelShape(layers=4, heads=4, kv_heads=2, inner_size=512, vocabulary=512),
}
"""80m: on a CPU slow enough to compute that loading pays, small enough to wait for."""


def write_checkpoint(shape: ModelShape, longest_tokens: int, folder: Path) -> Path:
    """Configuration, weights and tokenizer in `folder`. Seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    hidden = shape.heads * HEAD_SIZE
    fields: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": hidden,
        "intermediate_size": shape.inner_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": longest_tokens,
        "bos_token_id": _BEGIN,
        "eos_token_id": _END,
        "tie_word_embeddings": True,
        "initializer_range": hidden**-0.5,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder, shape.vocabulary)
    return folder


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Made-up words. Prompts are token ids, but `vllm serve` does not start without one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": _BEGIN, "</s>": _END}
    words |= {f"w{number}": number for number in range(_FIRST_WORD, vocabulary)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)

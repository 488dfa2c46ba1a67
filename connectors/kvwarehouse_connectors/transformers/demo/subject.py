"""The model that the demo asks: built on the spot, or a checkpoint of the user's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import kvwarehouse as kvw
from kvwarehouse_connectors.transformers.demo.text import train_tokenizer

_SEED = 0
_HIDDEN = 768
_LONGEST = 16_384


@dataclass(frozen=True)
class Subject:
    """weights: their fingerprint. encode: text to ids. random: the weights are noise."""

    model: Any
    weights: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    random: bool
    longest: int
    """Positions that the model knows."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def description(self) -> str:
        kind = type(self.model).__name__.removesuffix("ForCausalLM")
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"{kind}, {self.parameters / 1e6:.0f}M parameters, {dtype}"


def built(text: str) -> Subject:
    """Llama architecture, 12 layers of 768, 4 KV heads, seeded random weights."""
    tokenizer = train_tokenizer(text)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=_HIDDEN,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=_LONGEST,
        # With the default 0.02 and tied embeddings the model repeats one token whatever it reads,
        # and a damaged cache would go unnoticed.
        initializer_range=_HIDDEN**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    dtype = faster_dtype()
    generator_state = torch.get_rng_state()
    torch.manual_seed(_SEED)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    torch.set_rng_state(generator_state)
    return Subject(
        model,
        kvw.fingerprint(f"kvwarehouse-demo@seed-{_SEED},torch-{torch.__version__}"),
        lambda text: list(tokenizer.encode(text).ids),
        tokenizer.decode,
        True,
        _LONGEST,
    )


def checkpoint(path: str) -> Subject:
    """Raises UsageError where `path` is no checkpoint that transformers can read here."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise kvw.UsageError(
            f"--model {path} has no config.json; name the directory of a checkpoint",
            code="bad_model",
        )
    try:
        with _without_bars():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise kvw.UsageError(
            f"--model {path} cannot be read by transformers {transformers.__version__}: {error}",
            code="bad_model",
        ) from error
    # Answers are the most likely tokens: the library would warn of a temperature or a length.
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=model.generation_config.eos_token_id
    )
    return Subject(
        model,
        kvw.fingerprint(folder),
        # Not verbose: the whole document is longer than most models allow; prompts are cut from it.
        lambda text: list(tokenizer.encode(text, add_special_tokens=False, verbose=False)),
        tokenizer.decode,
        False,
        getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", _LONGEST),
    )


@contextmanager
def _without_bars() -> Iterator[None]:
    """The library's own progress bars would write over the demo's."""
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


def faster_dtype() -> torch.dtype:
    """bfloat16, or float32 where this processor emulates bfloat16 and is slower in it."""
    return min((torch.bfloat16, torch.float32), key=_product_s)


def _product_s(dtype: torch.dtype) -> float:
    """The best of a few products of the size that a chunk has in one layer."""
    left = torch.ones(128, _HIDDEN, dtype=dtype)
    right = torch.ones(2048, _HIDDEN, dtype=dtype)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        torch.nn.functional.linear(left, right)
        times.append(time.perf_counter() - started)
    return min(times)

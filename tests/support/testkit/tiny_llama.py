"""A Llama that is computed in milliseconds, for tests of connectors."""

from __future__ import annotations

from typing import Any


def tiny_llama(torch: Any, transformers: Any) -> Any:
    """2 layers, 64 hidden, 2 KV heads of 16, bfloat16, the same weights each time. They are spread
    enough for tokens to matter: with the default initialisation a zeroed page changes nothing."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=64**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()

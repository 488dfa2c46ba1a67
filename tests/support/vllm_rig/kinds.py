"""Kinds of models by the cache groups that vLLM makes of them, and how each is run. A continuation
needs all blocks of full attention, the last ones of a window, one state of linear attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_rig.compare import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE


@dataclass(frozen=True)
class Kind:
    shape: str
    """Of checkpoints.py."""
    options: dict[str, Any] = field(default_factory=dict)
    block: int = 32
    checkpoint: int = 32
    """Tokens between the places inside a prompt at which another one may go on."""
    tolerance: float = FLOAT32_TOLERANCE

    def blocks_of(self, tokens: int) -> int:
        """Tokens in whole blocks."""
        return tokens // self.block * self.block

    def hit(self, tokens: int) -> int:
        """Tokens that a prompt loads which was stored whole: the last token is computed."""
        return self.blocks_of(tokens - 1)


GPT_OSS = Kind("gpt-oss")
GEMMA3 = Kind("gemma3", {"max_num_batched_tokens": 96, "max_num_seqs": 2})
"""In pieces of three blocks, or of whatever another request leaves of them."""
MISTRAL = Kind("mistral")
QWEN3_NEXT = Kind(
    "qwen3-next",
    # vLLM's linear attention on the CPU knows no other type. It keeps states at the ends of pieces.
    {
        "dtype": "bfloat16",
        "max_num_batched_tokens": 400,
        "prefix_cache_retention_interval": 160,
    },
    block=160,
    checkpoint=320,
    tolerance=BFLOAT16_TOLERANCE,
)
# Latent attention, whose backend on the CPU chooses its own block. vLLM's experts on the CPU know
# no float32, and its own cache is off.
DEEPSEEK3 = Kind("deepseek3", {"dtype": "bfloat16", "num_gpu_blocks_override": 200}, block=16)

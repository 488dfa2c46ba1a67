"""Tiny models with random weights, made on the spot: nothing is downloaded.

Weights are spread (standard deviation hidden**-0.5) and the head is a matrix of its own, so that
every token of the prompt matters to the next one; the usual initialisation gives nearly flat
probabilities, with which a zeroed page changes nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_rig import tokenizer

VOCABULARY = 512
WINDOW = 64
_HIDDEN = 256

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": tokenizer.BEGIN,
    "eos_token_id": tokenizer.END,
    "pad_token_id": tokenizer.END,
    "tie_word_embeddings": False,
}


def _layers(count: int, period: int) -> list[str]:
    """A layer of full attention after each period - 1 layers with a window."""
    return [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(count)
    ]


# --- shapes: for each a configuration class, a model class, and what differs from _BASE


def _llama() -> tuple[str, str, dict[str, Any]]:
    return "LlamaConfig", "LlamaForCausalLM", {}


def _llama_80m() -> tuple[str, str, dict[str, Any]]:
    """Slow enough to compute that loading wins: for timings."""
    size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    return "LlamaConfig", "LlamaForCausalLM", {**size, **heads}


def _mistral() -> tuple[str, str, dict[str, Any]]:
    """One group, every layer with a window."""
    return "MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}


def _gpt_oss() -> tuple[str, str, dict[str, Any]]:
    """Two groups: layers with a window and full ones alternate."""
    attention = {"head_dim": 64, "sliding_window": WINDOW, "layer_types": _layers(4, 2)}
    experts = {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2}
    return "GptOssConfig", "GptOssForCausalLM", {**attention, **experts}


def _gemma3() -> tuple[str, str, dict[str, Any]]:
    """Four groups: three layers with a window to a full one."""
    attention = {"head_dim": 64, "sliding_window": WINDOW, "layer_types": _layers(4, 4)}
    return "Gemma3TextConfig", "Gemma3ForCausalLM", {**attention, "query_pre_attn_scalar": 64}


def _qwen3_next() -> tuple[str, str, dict[str, Any]]:
    """Three groups of linear attention, whose state is one page, and one of full attention."""
    linear = {
        "head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    # Every expert for every token: in bfloat16 a tie between two would be lost now and then.
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
    }
    return "Qwen3NextConfig", "Qwen3NextForCausalLM", {**linear, **experts}


def _deepseek3() -> tuple[str, str, dict[str, Any]]:
    """Latent attention: one vector a token and layer, no heads. On the CPU vLLM's prefill and
    decode of it disagree, so compare its pages, not its texts."""
    latent = {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    experts = {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
    }
    return "DeepseekV3Config", "DeepseekV3ForCausalLM", {**latent, **experts}


SHAPES: dict[str, Callable[[], tuple[str, str, dict[str, Any]]]] = {
    "llama": _llama,
    "llama-80m": _llama_80m,
    "mistral": _mistral,
    "gpt-oss": _gpt_oss,
    "gemma3": _gemma3,
    "qwen3-next": _qwen3_next,
    "deepseek3": _deepseek3,
}


class Checkpoints:
    """Folders of checkpoints, each made once. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, shape: str = "llama", seed: int = 0) -> Path:
        """The shared one: to be read only."""
        path = self._folder / f"{shape}-{seed}"
        if not path.exists():
            write(shape, seed, path)
        return path

    def draft(self, kind: str) -> Path:
        """A draft head of one layer for the llama: "eagle" or "eagle3". To be read only."""
        path = self._folder / kind
        if not path.exists():
            write_draft(kind, path)
        return path

    def copy(self, to: Path, shape: str = "llama", seed: int = 0) -> Path:
        """Puts it at `to`, over what is there: as an update of weights at the same path does."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.get(shape, seed), to)
        return to


def write(shape: str, seed: int, path: Path) -> None:
    """A checkpoint as users have them: configuration, safetensors, tokenizer. Seconds."""
    import torch
    import transformers

    config_class, model_class, fields = SHAPES[shape]()
    fields = {**_BASE, **fields}
    config = getattr(transformers, config_class)(
        **fields, initializer_range=fields["hidden_size"] ** -0.5
    )
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).to(torch.bfloat16)
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    _keep_fields(unfinished / "config.json", fields)
    tokenizer.write(unfinished, VOCABULARY)
    unfinished.rename(path)


def write_draft(kind: str, path: Path) -> None:
    """With random weights: nearly nothing that it drafts is accepted. The tensors' names are what
    vLLM reads (its models llama_eagle and llama_eagle3). The embedding and, of "eagle", the head
    are the target's."""
    import torch
    from safetensors.torch import save_file

    config = {**_BASE, "model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    hidden, inner, head = _HIDDEN, config["intermediate_size"], _HIDDEN // 4
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weights = torch.randn(rows, columns, generator=generator) * hidden**-0.5
        return weights.to(torch.bfloat16)

    def layer(name: str, width: int) -> dict[str, torch.Tensor]:
        attention = {"q": 4 * head, "k": 2 * head, "v": 2 * head}
        projections = {f"self_attn.{n}_proj": matrix(rows, width) for n, rows in attention.items()}
        projections |= {
            "self_attn.o_proj": matrix(hidden, hidden),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
            "post_attention_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
        }
        return {f"{name}.{part}.weight": weights for part, weights in projections.items()}

    if kind == "eagle":
        config |= {"architectures": ["LlamaForCausalLM"]}
        tensors = {**layer("layers.0", hidden), "fc.weight": matrix(hidden, 2 * hidden)}
    else:
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VOCABULARY,
            # Three different ones: those that vLLM chooses are not, in a model of four layers.
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
        tensors = {
            **layer("midlayer", 2 * hidden),
            **{f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms},
            "fc.weight": matrix(hidden, 3 * hidden),
            "lm_head.weight": matrix(VOCABULARY, hidden),
        }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, path / "model.safetensors")


def _keep_fields(path: Path, fields: dict[str, Any]) -> None:
    """transformers leaves out what it does not know, such as DeepSeek's topk_method."""
    config = json.loads(path.read_text(encoding="utf-8"))
    missing = {name: value for name, value in fields.items() if name not in config}
    path.write_text(json.dumps({**config, **missing}, indent=1), encoding="utf-8")

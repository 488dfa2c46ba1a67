"""LoRA adapters with random weights, strong enough to change what a tiny model says."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8
_STRENGTH = 0.2


def write(folder: Path, checkpoint: Path, seed: int) -> Path:
    """An adapter of the query and value projections of a llama at `checkpoint`."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in outputs.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (width, RANK))):
                weights = torch.randn(shape, generator=noise) * _STRENGTH
                tensors[f"{key}.{part}.weight"] = weights
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
        "base_model_name_or_path": str(checkpoint),
    }
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder

"""Public architectures by name: models.toml, whose fields pass through the reader of a local
config.json. Read-only.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import Architecture
from kvwarehouse.model.config import ConfigFields, architecture_of

# What the short forms of the file stand for; a number at the end may be left out.
_SHAPES = {
    "gqa": (
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "num_attention_heads",
        "hidden_size",
    ),
    "mla": ("num_hidden_layers", "num_attention_heads", "hidden_size"),
}


@dataclass(frozen=True)
class _KnownModel:
    """`params` and `active`, in billions, are 0 where they are not known."""

    fields: dict[str, Any]
    params: float
    active: float
    family: str
    source: str


def _read() -> dict[str, _KnownModel]:
    file = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
    return {
        name: _known(family, written)
        for family in file["family"]
        for name, written in family["models"].items()
    }


def _known(family: dict[str, Any], written: dict[str, Any]) -> _KnownModel:
    fields = {**family.get("fields", {}), **written}
    params = fields.pop("params", [0])
    for short, names in _SHAPES.items():
        fields.update(zip(names, fields.pop(short, ()), strict=False))
    return _KnownModel(fields, params[0], params[-1], family["name"], family["source"])


MODELS: dict[str, _KnownModel] = _read()

# Of a name, what says nothing about the architecture.
_TUNING = re.compile(
    r"-(instruct|chat|it|base|hf|fp8|awq|gptq|bf16|thinking|128e|16e|17b|0324|0528|\d{4})(?=-|$)"
)


def find_model(name: str) -> Architecture:
    """By its name, however it is written: `meta-llama/Llama-3.3-70B-Instruct` is llama-3.3-70b.
    Raises UsageError that names the nearest known ones."""
    plain = _normalised(name)
    known = MODELS.get(plain)
    if known is None:
        near = difflib.get_close_matches(plain, MODELS, n=3, cutoff=0.5)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise UsageError(
            f"the model {name!r} is not in the table{hint}; see `kvwarehouse size --list`, or give"
            " --config with the path of its config.json",
            code="unknown_model",
        )
    fields = ConfigFields(known.fields, f"the table's {plain}")
    return architecture_of(
        fields, name=plain, params=known.params * 1e9, active_params=known.active * 1e9
    )


def _normalised(name: str) -> str:
    plain = name.strip().lower().rpartition("/")[2].replace("_", "-").replace(" ", "-")
    plain = plain.removeprefix("meta-")
    if plain in MODELS:
        return plain
    plain = _TUNING.sub("", plain)
    return re.sub(r"^(llama|qwen|gemma|gpt|mistral|mixtral)(\d)(?!\d*x)", _spelled, plain)


def _spelled(match: re.Match[str]) -> str:
    """`llama3.3` is called llama-3.3; Qwen writes its number without a dash."""
    family, number = match.groups()
    return f"{family}{number}" if family == "qwen" else f"{family}-{number}"

"""How what a block depends on is written into a namespace. Stateless."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def digest_of(values: Any) -> str:
    """Of plain values, in any order of their names."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def short_name(model: str) -> str:
    """A name for people; what tells models apart stands beside it."""
    name = Path(model).name or model
    return "".join(c for c in name if c.isprintable())[:200] or "model"

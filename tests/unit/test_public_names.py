"""Names that users write or read stay, whatever is moved or renamed beneath them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests/fixtures/public_names.toml"
PROGRAM = ROOT / "scripts/public_names.py"


def members(text: str) -> set[tuple[str, str, str]]:
    kinds: dict[str, dict[str, list[str]]] = tomllib.loads(text)
    return {
        (kind, of, name)
        for kind, lists in kinds.items()
        for of, names in lists.items()
        for name in names
    }


def test_every_public_name_is_the_one_that_is_kept() -> None:
    """In a process of its own: to list the commands it imports some without what they need."""
    command: list[Any] = [sys.executable, PROGRAM]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    now, kept = members(ran.stdout), members(KEPT.read_text("utf-8"))
    assert not kept - now, f"gone: {sorted(kept - now)}; users have written these"
    assert not now - kept, f"new: {sorted(now - kept)}; {PROGRAM.name} says how they are kept"

"""Whose turn it is first. Stateless."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def rotated(ways: Sequence[_T], turn: int) -> list[_T]:
    """All of them, each one first in its turn."""
    at = turn % len(ways)
    return [*ways[at:], *ways[:at]]

"""A call of the service as a value: what is sent, and what its answer means. Any channel takes it.

Immutable; thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Call(Generic[_T]):
    method: str
    request: Any
    decode: Callable[[Any], _T]
    """Of the answer; where answers are streamed, of each."""
    timeout_s: float | None = None
    """None: the channel's."""

"""One JSON object of a trace as checked values. Stateless; thread-safe.

A complaint is a BadLineError: what is wrong with this object, without its place. The reader of the
file knows the place, and whether to go on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**53


class BadLineError(ValueError):
    """Says what is wrong, in words that stand behind "file:line: "."""


def decoded(text: bytes | str) -> Any:
    """JSON, without the infinities that Python lets in. Raises BadLineError."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise BadLineError("nested too deeply") from error
    except ValueError as error:
        raise BadLineError(f"not JSON ({error})") from error


def an_object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadLineError(f"a {type(value).__name__} where an object belongs")
    return value


def seconds(fields: Mapping[str, Any], name: str, *, unit_s: float = 1.0) -> float:
    """The time `name`, of units of `unit_s` seconds."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLineError(f"{name} is {_shown(value)}, not a number")
    if not (math.isfinite(value) and 0 <= value < _LARGEST):
        raise BadLineError(f"{name} is {_shown(value)}; it must be 0 or more")
    return value * unit_s


def tokens(fields: Mapping[str, Any], name: str, default: int) -> int:
    """A length; `default` where there is none."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadLineError(f"{name} is {_shown(value)}, not a whole number")
    if not 0 <= value < _LARGEST:
        raise BadLineError(f"{name} is {_shown(value)}; it must be 0 to 2^53")
    return value


def blocks(fields: Mapping[str, Any], name: str = "hash_ids") -> list[int]:
    """The ids of a request's blocks, root first."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise BadLineError(f"{name} is {_shown(value)}, not a list of block ids")
    for each in value:
        if type(each) is not int or each < 0:
            raise BadLineError(f"{name} has {_shown(each)}; block ids are whole numbers from 0")
    return value


def keys(fields: Mapping[str, Any], name: str = "keys") -> list[str]:
    """The keyed hashes of a recording."""
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise BadLineError(f"{name} is {_shown(value)}, not a list of keys")
    return value


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

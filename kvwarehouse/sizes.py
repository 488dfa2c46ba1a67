"""Sizes as people write them: "64GiB", "500GB", "1.5 TiB", 1048576. Stateless; thread-safe."""

from __future__ import annotations

import re
from decimal import Decimal

from kvwarehouse.errors import UsageError

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_LARGEST = 2**63 - 1


def parse_size(text: str | int, *, name: str = "size") -> int:
    """Bytes that `text` means. KiB, MiB, GiB, TiB, PiB are powers of 1024; KB, MB, GB, TB, PB are
    powers of 1000; a bare number is bytes. A fraction must come to whole bytes, or is cut to them.

    "64G" is refused: it means two different sizes to different people. Raises UsageError that
    names `name`, the value and the fix."""
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise _bad(name, text, "is not a size")
    if isinstance(text, int):
        return _bounded(name, text, text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise _bad(name, text, "is not a size")
    unit = _UNITS.get(match[2].lower())
    if unit is None:
        raise _bad(name, text, f"has the unknown unit {match[2]!r}")
    return _bounded(name, text, int(Decimal(match[1]) * unit))


def format_size(size_bytes: float) -> str:
    """`size_bytes` for people, in powers of 1024: "0 B", "1.5 GiB", "64 GiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} PiB"


def _three_digits(value: float) -> str:
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "0" if text == "-0" else text


def _bounded(name: str, text: str | int, value: int) -> int:
    if not 0 <= value <= _LARGEST:
        raise _bad(name, text, "is out of range (0 to 2^63 - 1 bytes)")
    return value


def _bad(name: str, text: object, problem: str) -> UsageError:
    return UsageError(
        f"{name} {text!r} {problem}; write a number with a unit, such as 64GiB or 500GB",
        code="bad_size",
        context={"name": name, "value": text},
    )

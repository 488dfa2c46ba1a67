"""Spans of time as people write them: "90s", "15m", "2h", "3d", 1.5. Stateless; thread-safe."""

from __future__ import annotations

import math
import re

from kvwarehouse.errors import UsageError

_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)


def parse_duration(text: str, *, name: str, most_s: float = 366 * 86_400.0) -> float:
    """Seconds that `text` means; a bare number is seconds. Raises UsageError that names `name`, the
    value and the fix, where it is none, not above 0, or over `most_s`."""
    match = _SPAN.fullmatch(text)
    unit_s = _UNITS_S.get(match[2]) if match else None
    if match is None or unit_s is None:
        raise _bad(name, text, "is no span of time")
    found = float(match[1]) * unit_s
    if not (0 < found <= most_s and math.isfinite(found)):
        raise _bad(name, text, f"is out of range (above 0, at most {format_duration(most_s)})")
    return found


def format_duration(seconds: float) -> str:
    """For people: "350 ms", "12.3 s", "00:05:07", "2 d 03:00:00"."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    days, rest = divmod(int(seconds), 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


def _bad(name: str, text: str, problem: str) -> UsageError:
    return UsageError(
        f"{name} {text!r} {problem}; write a number with a unit, such as 90s, 15m, 2h or 3d",
        code="bad_duration",
        context={"name": name, "value": text},
    )

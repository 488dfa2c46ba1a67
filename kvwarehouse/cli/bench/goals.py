"""What the project asks of itself, in words that are shown and judged: one text for both.

    "ratio 0.75 or more"   of a figure's ratio to its limit
    "ratio 1.5 or less"
    "under 100 us"         of the figure itself, in its own unit

Stateless; thread-safe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_RATIO = re.compile(r"ratio (?P<bound>\d+(?:\.\d+)?) or (?P<side>more|less)")
_VALUE = re.compile(r"under (?P<bound>\d[\d,]*(?:\.\d+)?) (?P<unit>\S.*)")


@dataclass(frozen=True)
class Goal:
    of_ratio: bool
    holds: Callable[[float], bool]


def read_goal(words: str, unit: str) -> Goal:
    """Raises ValueError on words that cannot be judged, so that no goal is shown unjudged."""
    if found := _RATIO.fullmatch(words):
        bound = float(found["bound"])
        if found["side"] == "more":
            return Goal(True, lambda ratio: ratio >= bound)
        return Goal(True, lambda ratio: ratio <= bound)
    found = _VALUE.fullmatch(words)
    if found is None or found["unit"] != unit:
        raise ValueError(
            f"the goal {words!r} of a figure in {unit!r} cannot be judged; write 'ratio N or more',"
            f" 'ratio N or less' or 'under N {unit}'"
        )
    bound = float(found["bound"].replace(",", ""))
    return Goal(False, lambda value: value < bound)

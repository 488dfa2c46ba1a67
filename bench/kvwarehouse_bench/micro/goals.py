"""What the project asks of itself, in words that are shown and judged: one text for both.

    "ratio 0.75 or more"   of a figure's ratio to its limit
    "ratio 1.5 or less"
    "rounds reach ratio 0.9" of the upper end of the middle half of the rounds' ratios: for limits
                           that vary by themselves, as disks do
    "under 100 us"         of the figure itself, in its own unit

Stateless; thread-safe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

_RATIO = re.compile(r"ratio (?P<bound>\d+(?:\.\d+)?) or (?P<side>more|less)")
_ROUNDS = re.compile(r"rounds reach ratio (?P<bound>\d+(?:\.\d+)?)")
_VALUE = re.compile(r"under (?P<bound>\d[\d,]*(?:\.\d+)?) (?P<unit>\S.*)")


@dataclass(frozen=True)
class Goal:
    judges: Literal["value", "ratio", "rounds"]
    holds: Callable[[float], bool]


def read_goal(words: str, unit: str) -> Goal:
    """Raises ValueError on words that cannot be judged, so that no goal is shown unjudged."""
    if found := _RATIO.fullmatch(words):
        bound = float(found["bound"])
        if found["side"] == "more":
            return Goal("ratio", lambda ratio: ratio >= bound)
        return Goal("ratio", lambda ratio: ratio <= bound)
    if found := _ROUNDS.fullmatch(words):
        bound = float(found["bound"])
        return Goal("rounds", lambda ratio: ratio >= bound)
    found = _VALUE.fullmatch(words)
    if found is None or found["unit"] != unit:
        raise ValueError(
            f"the goal {words!r} of a figure in {unit!r} cannot be judged; write 'ratio N or more',"
            f" 'ratio N or less', 'rounds reach ratio N' or 'under N {unit}'"
        )
    bound = float(found["bound"].replace(",", ""))
    return Goal("value", lambda value: value < bound)

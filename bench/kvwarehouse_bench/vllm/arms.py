"""Names of the arms that alternate inside one engine, and what is read off their steps.

A triple is one turn of each arm, one after the other in random order; its ratios compare neighbours
in time. Stateless.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvwarehouse_bench.harness.alternation import Spread, interval

OFF, OFF_AGAIN, ON = "off", "off again", "on"
ARMS = (OFF, OFF_AGAIN, ON)

Step = tuple[int, str, int, int]
"""(turn, arm, tokens, ns)."""


@dataclass(frozen=True)
class Effect:
    """Ratios to `off`, of each triple and their medians with a 95 % interval. step_s: the median
    turn's mean step, off."""

    steps: int
    triples: int
    step_s: float
    again_ratios: Sequence[float]
    on_ratios: Sequence[float]
    again: Spread
    on: Spread


def effect(log: Sequence[Step], tokens: int, steps_each: int) -> Effect | None:
    """Of whole turns whose steps all had so many tokens; None where there is no whole triple."""
    turns: dict[int, list[Step]] = defaultdict(list)
    for step in log:
        if step[0] >= 0:
            turns[step[0]].append(step)
    means: dict[int, dict[str, float]] = defaultdict(dict)
    for turn, steps in turns.items():
        if len(steps) == steps_each and all(step[2] == tokens for step in steps):
            means[turn // len(ARMS)][steps[0][1]] = statistics.fmean(step[3] for step in steps)
    triples = [triple for triple in means.values() if len(triple) == len(ARMS)]
    if not triples:
        return None
    again = [triple[OFF_AGAIN] / triple[OFF] for triple in triples]
    on = [triple[ON] / triple[OFF] for triple in triples]
    return Effect(
        steps=len(triples) * len(ARMS) * steps_each,
        triples=len(triples),
        step_s=statistics.median(triple[OFF] for triple in triples) / 1e9,
        again_ratios=again,
        on_ratios=on,
        again=interval(again),
        on=interval(on),
    )

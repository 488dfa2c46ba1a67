"""What an item costs by how many there are: pages of a prompt looked up and loaded, entries of the
index, sessions. Where cost grows faster than the number, an item's rises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvwarehouse_bench.micro import growth_index, growth_prompt, growth_sessions
from kvwarehouse_bench.micro.figures import Curve, Figure
from kvwarehouse_bench.micro.options import Options

_PARTS: Sequence[Callable[[Options], list[Curve]]] = (
    growth_prompt.lookups,
    growth_prompt.loads,
    growth_index.in_daemons,
    growth_index.alone,
    growth_sessions.by_sessions,
)


def measure(options: Options) -> list[Figure | Curve]:
    curves = [curve for part in _PARTS for curve in part(options)]
    growths = [(curve, curve.growth) for curve in curves]
    return [*(_figure(curve, growth) for curve, growth in growths if growth), *curves]


def _figure(curve: Curve, growth: float) -> Figure:
    """Of the last point, over the cheapest: 1 where an item costs least when there are most."""
    most = curve.points[-1][0]
    return Figure(
        f"{curve.plot}, {curve.name}: an item of {most:,.0f}, over the cheapest", growth, "times"
    )

"""What this project wants to know of a GPU, with its goals: a figure, or why there is none.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvwarehouse_bench.micro.figures import Figure

NO_GPU = "no GPU here"
TO_GPU = "pinned DRAM to GPU, scattered pages of 256 KiB and more, against one large copy"
FROM_GPU = "GPU to pinned DRAM, likewise"
HBM = "HBM tier: load against a copy on the device"
DIGEST = "digest on the device, share of the transfer's time"


@dataclass(frozen=True)
class GpuGoal:
    name: str
    goal: str
    needs: str
    """The part that measures it."""


GPU_GOALS = (
    GpuGoal(TO_GPU, "ratio 0.9 or more", "pinned"),
    GpuGoal(FROM_GPU, "ratio 0.9 or more", "pinned"),
    GpuGoal(DIGEST, "under 5 %", "hbm"),
    GpuGoal(HBM, "ratio 0.8 or more", "hbm"),
    GpuGoal("NVMe to GPU, against the disk's own reads", "ratio 0.9 or more", "nvme"),
    GpuGoal("first token at 32k tokens from DRAM, against recomputing", "ratio 20 or more", "ttft"),
)


@dataclass(frozen=True)
class PartOutcome:
    """Of one part: what it measured, and why nothing, or not all."""

    part: str
    figures: Sequence[Figure] = ()
    why_not: str = ""


def lines_of(outcomes: Sequence[PartOutcome]) -> list[tuple[str, str, str, str]]:
    """(figure, goal, measured, verdict): everything that is wanted, in order, then what else was
    measured. A figure that was not measured says why."""
    measured = {figure.name: figure for outcome in outcomes for figure in outcome.figures}
    reasons = {outcome.part: outcome.why_not for outcome in outcomes}
    lines = []
    for wanted in GPU_GOALS:
        figure = measured.pop(wanted.name, None)
        if figure is None:
            why = reasons.get(wanted.needs) or "not run"
            lines.append((wanted.name, wanted.goal, f"not measured: {why}", ""))
        else:
            lines.append((wanted.name, wanted.goal, shown(figure), figure.verdict))
    return lines + [(f.name, f.goal, shown(f), f.verdict) for f in measured.values()]


def shown(figure: Figure) -> str:
    text = f"{figure.value:.3g} {figure.unit}"
    if figure.limit is not None:
        text += f"; {figure.limit_name} {figure.limit:.3g} {figure.unit}"
    if figure.ratio is not None:
        text += f"; ratio {figure.ratio:.2f}"
    return text

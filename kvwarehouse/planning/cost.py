"""What reuse saves: GPU time, energy, money. Stateless; thread-safe."""

from __future__ import annotations

from dataclasses import dataclass

from kvwarehouse.planning.compute import Prefill
from kvwarehouse.planning.hardware import Gpu
from kvwarehouse.planning.interval import Estimate, Quantity
from kvwarehouse.planning.workload import Workload

SECONDS_PER_DAY = 86_400

# Part of its board power that a GPU draws in prefill, and what cooling and conversion add.
_POWER_PART = Quantity(0.85, 0.6, 1.0)
_FACILITY = Quantity(1.3, 1.1, 1.6)


@dataclass(frozen=True)
class Prices:
    """In one currency, whichever."""

    gpu_hour: Quantity
    kwh: Quantity
    assumption: str


def savings(
    workload: Workload, prefill: Prefill, gpu: Gpu, gpus: int, prices: Prices
) -> dict[str, Estimate]:
    """Per day. The GPUs compute for others while a prefix loads, so loading costs them nothing."""
    tokens, cached = workload.prompt_tokens, workload.hit_tokens
    # Linear and quadratic part of the cached tokens alone: what is no longer computed.
    each = prefill.seconds(cached)
    gpu_hours = each * (workload.requests_per_s * SECONDS_PER_DAY * gpus / 3600)
    kwh = gpu_hours * _POWER_PART * _FACILITY * (gpu.watts / 1000)
    load = (
        f"{workload.requests_per_s:g} requests/s, {cached:,} of {tokens:,} tokens reused, day long"
    )
    return {
        "gpu_hours_per_day": Estimate(
            "GPU-hours saved a day", gpu_hours, "h", f"{load}; {prefill.assumption}"
        ),
        "energy_kwh_per_day": Estimate(
            "energy saved a day",
            kwh,
            "kWh",
            f"{_POWER_PART.value:.0%} ({_POWER_PART.low:.0%} to {_POWER_PART.high:.0%}) of"
            f" {gpu.watts:g} W a GPU, {_FACILITY.value:g} ({_FACILITY.low:g} to"
            f" {_FACILITY.high:g}) for the facility",
        ),
        "gpu_money_per_day": Estimate(
            "GPU time saved a day, in money", gpu_hours * prices.gpu_hour, "", prices.assumption
        ),
        "energy_money_per_day": Estimate(
            "energy saved a day, in money (part of rented GPUs' price)",
            kwh * prices.kwh,
            "",
            prices.assumption,
        ),
    }

"""Flags that say what an engine and its tiers can do: of `plan` and `replay`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from kvwarehouse.errors import UsageError
from kvwarehouse.model.footprint import Footprint
from kvwarehouse.planning.hardware import GPUS, Gpu, TierSpeed, find_gpu
from kvwarehouse.planning.interval import Quantity, within
from kvwarehouse.planning.latency import (
    Decode,
    DecodeStep,
    Prefill,
    estimated_decode,
    estimated_prefill,
    measured_decode,
    measured_prefill,
)
from kvwarehouse.planning.plan import ServiceLoad
from kvwarehouse.sizes import parse_size

_MOST_GPUS = 100_000
_MOST_BATCH = 100_000


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the engine")
    group.add_argument(
        "--gpu", default="h100-sxm", metavar="NAME", help=f"{', '.join(GPUS)} (default: h100-sxm)."
    )
    group.add_argument("--gpus", type=int, default=8, help="That serve the model (default: 8).")
    group.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        metavar="RATE",
        help="Measured, all GPUs together (default: estimated from FLOPs).",
    )
    group.add_argument("--params", metavar="N", help="Parameters in billions, where not known.")
    group.add_argument("--active-params", metavar="N", help="Of them per token, in billions.")
    group.add_argument(
        "--heads", type=int, metavar="N", help="Query heads of a layer, where not known."
    )


def add_decode_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the engine's answers")
    group.add_argument(
        "--decode-ms",
        type=float,
        metavar="MS",
        help="Per output token, measured (default: estimated).",
    )
    group.add_argument(
        "--batch", type=int, default=32, help="Requests decoded together (default: 32)."
    )


def add_tier_flags(parser: argparse.ArgumentParser, *, remote: bool) -> None:
    """Rates of DRAM and NVMe; of the remote tier and the network too where they matter."""
    group = parser.add_argument_group("rates of the tiers")
    titles = [("dram", "DRAM"), ("nvme", "NVMe"), *([("remote", "remote")] if remote else [])]
    for tier, title in titles:
        for way in ("read", "write"):
            group.add_argument(
                f"--{tier}-{way}", metavar="SIZE", help=f"The {title} tier's {way}s a second."
            )
    if not remote:
        return
    group.add_argument(
        "--network", type=float, default=100.0, metavar="GBIT", help="Gb/s (default: 100)."
    )
    group.add_argument("--rdma", action="store_true", help="The network has RDMA.")


def gpu_from(args: argparse.Namespace) -> Gpu:
    """Raises UsageError for an unknown GPU or a number of them that cannot be."""
    if not 1 <= args.gpus <= _MOST_GPUS:
        raise UsageError(f"{args.gpus} GPUs cannot be; use 1 to {_MOST_GPUS:,}", code="bad_gpus")
    return find_gpu(args.gpu)


def with_given_size(footprint: Footprint, args: argparse.Namespace) -> Footprint:
    """With the parameters and query heads that flags give. Raises UsageError for what cannot be."""
    if args.heads is not None:
        if args.heads < 1:
            raise UsageError(f"--heads {args.heads} cannot be; use 1 or more", code="bad_heads")
        model = replace(footprint.model, attention_heads=args.heads)
        footprint = replace(footprint, model=model)
    return _with_params(footprint, args)


def _with_params(footprint: Footprint, args: argparse.Namespace) -> Footprint:
    """What --active-params leaves out is known of the model, or given by --params."""
    model = footprint.model
    params, active = model.params, model.active_params
    if args.params is not None:
        params = active = _billions("--params", args.params)
    if args.active_params is not None:
        active = _billions("--active-params", args.active_params)
        if not params:
            raise UsageError(
                f"--active-params needs --params: how many parameters {model.name} has is not"
                " known",
                code="bad_params",
            )
    if active > params:
        raise UsageError(
            f"--active-params {args.active_params} is more than all {params / 1e9:g} billion"
            " parameters (--params)",
            code="bad_params",
        )
    return replace(footprint, model=replace(model, params=params, active_params=active))


def _billions(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UsageError(
            f"{flag} {text!r} is not a number of billions; 70.6 is 70.6 billion", code="bad_params"
        )
    return value * 1e9


def prefill_from(args: argparse.Namespace, footprint: Footprint, gpu: Gpu) -> Prefill:
    if args.prefill_tokens_per_s is not None:
        return measured_prefill(args.prefill_tokens_per_s)
    return estimated_prefill(footprint.model, gpu, args.gpus)


def decode_from(
    args: argparse.Namespace, footprint: Footprint, gpu: Gpu, workload: ServiceLoad
) -> Decode:
    if args.decode_ms is not None:
        return measured_decode(args.decode_ms)
    if not 1 <= args.batch <= _MOST_BATCH:
        raise UsageError(f"a batch of {args.batch} cannot be; use 1 or more", code="bad_batch")
    context = workload.prompt_tokens + workload.output_tokens // 2
    return estimated_decode(DecodeStep(footprint, gpu, args.gpus, args.batch, context))


def tiers_from(args: argparse.Namespace, gpu: Gpu) -> list[TierSpeed]:
    """Defaults: DRAM is bound by the PCIe links of all GPUs, at worst by one core that copies and
    digests; NVMe is one drive of its day."""
    links = gpu.host_bytes_per_s * args.gpus
    copies = min(links, 12.6e9)
    dram = Quantity(max(links * 0.7, copies), copies, links)
    return [
        _tier(args, "dram", (dram, dram), within(50e-6, 0.8, 3), "the GPUs' PCIe links"),
        _tier(
            args,
            "nvme",
            (Quantity(6e9, 3e9, 12e9), Quantity(2.5e9, 1.5e9, 5e9)),
            within(500e-6, 0.6, 3),
            "one NVMe drive",
        ),
    ]


def remote_from(args: argparse.Namespace) -> TierSpeed:
    """By default bound by the network. Raises UsageError for a network that cannot be."""
    if not 0 < args.network < 1e6:
        raise UsageError(
            f"a network of {args.network:g} Gb/s cannot be; use a positive rate", code="bad_network"
        )
    wire = within(args.network * 1e9 / 8 * 0.7, 0.5, 0.3)
    bound = f"a network of {args.network:g} Gb/s"
    return _tier(args, "remote", (wire, wire), within(2e-3, 0.8, 4), bound)


def _tier(
    args: argparse.Namespace,
    name: str,
    default: tuple[Quantity, Quantity],
    latency_s: Quantity,
    bound: str,
) -> TierSpeed:
    rates, said = [], []
    for way, usual in zip(("read", "write"), default, strict=True):
        given = getattr(args, f"{name}_{way}")
        rate = usual
        if given is not None:
            size = parse_size(given, name=f"--{name}-{way}")
            rate = within(float(size), 0.1, 0.1)
        rates.append(rate)
        origin = "given, +-10 %" if given is not None else f"{bound}"
        low, high = f"{rate.low / 1e9:.3g}", f"{rate.high / 1e9:.3g}"
        said.append(f"{way}s {rate.value / 1e9:.3g} GB/s ({low} to {high}; {origin})")
    return TierSpeed(name, rates[0], rates[1], latency_s, ", ".join(said))

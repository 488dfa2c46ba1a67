"""`kvwarehouse plan`: what loading KV instead of computing it would bring, on given hardware."""

from __future__ import annotations

import argparse
from dataclasses import replace

from kvwarehouse.cli.answer import add_answer, show
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.shape import add_shape, footprint_from
from kvwarehouse.errors import UsageError
from kvwarehouse.planner.compute import (
    Decode,
    DecodeStep,
    Prefill,
    estimated_decode,
    estimated_prefill,
    measured_decode,
    measured_prefill,
)
from kvwarehouse.planner.footprint import Footprint
from kvwarehouse.planner.hardware import GPUS, Gpu, TierSpeed, find_gpu
from kvwarehouse.planner.plan import Network, Plan
from kvwarehouse.planner.plan_report import plan_report
from kvwarehouse.planner.quantity import Quantity, within
from kvwarehouse.planner.savings import Prices
from kvwarehouse.planner.workload import Workload
from kvwarehouse.sizes import parse_size

EXAMPLES = """\
  kvwarehouse plan --model llama-3.3-70b --gpu h100 --gpus 8
  kvwarehouse plan --model qwen2.5-7b --prefill-tokens-per-s 24000 --nvme-read 12GB --reuse 0.7
  kvwarehouse plan --model llama-3.3-70b --gpus 64 --prompt-tokens 4096 --network 400 --rdma --json

Rates are per second and of the whole host: --dram-read 40GB is 40 GB/s. `kvwarehouse bench`
measures those of this machine. docs/sizing.md has the formulas and the sources of what is assumed.
"""

_MOST_GPUS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--params", metavar="N", help="Parameters in billions, where not known.")
    parser.add_argument("--active-params", metavar="N", help="Of them per token, in billions.")
    _add_workload(parser)
    _add_engine(parser)
    _add_tiers(parser)
    _add_prices(parser)
    add_answer(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the workload")
    group.add_argument("--prompt-tokens", type=int, default=8192, help="Mean (default: 8192).")
    group.add_argument("--output-tokens", type=int, default=512, help="Mean (default: 512).")
    group.add_argument("--requests-per-s", type=float, default=1.0, help="Mean (default: 1).")
    group.add_argument(
        "--reuse",
        type=float,
        default=0.5,
        help="Part of a prompt found stored, 0 to 1 (default: 0.5).",
    )
    group.add_argument("--steady", action="store_true", help="The rate hardly changes over a day.")


def _add_engine(parser: argparse.ArgumentParser) -> None:
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
    group.add_argument(
        "--decode-ms",
        type=float,
        metavar="MS",
        help="Per output token, measured (default: estimated).",
    )
    group.add_argument(
        "--batch", type=int, default=32, help="Requests decoded together (default: 32)."
    )


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tiers and network")
    for tier, title in (("dram", "DRAM"), ("nvme", "NVMe"), ("remote", "remote")):
        for way in ("read", "write"):
            group.add_argument(
                f"--{tier}-{way}", metavar="SIZE", help=f"The {title} tier's {way}s a second."
            )
    group.add_argument(
        "--network", type=float, default=100.0, metavar="GBIT", help="Gb/s (default: 100)."
    )
    group.add_argument("--rdma", action="store_true", help="The network has RDMA.")


def _add_prices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prices, in any one currency")
    group.add_argument("--gpu-hour-price", type=float, help="Of one GPU (default: 1.5 to 5).")
    group.add_argument("--kwh-price", type=float, help="Of energy (default: 0.06 to 0.3).")


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.gpus <= _MOST_GPUS:
        raise UsageError(f"{args.gpus} GPUs cannot be; use 1 to {_MOST_GPUS:,}", code="bad_gpus")
    if not 0 < args.network < 1e6:
        raise UsageError(f"a network of {args.network:g} Gb/s cannot be", code="bad_network")
    gpu = find_gpu(args.gpu)
    footprint = _with_params(footprint_from(args), args)
    workload = Workload(
        args.prompt_tokens, args.output_tokens, args.requests_per_s, args.reuse, args.steady
    )
    plan = Plan(
        footprint=footprint,
        workload=workload,
        gpu=gpu,
        gpus=args.gpus,
        prefill=_prefill(args, footprint, gpu),
        decode=_decode(args, footprint, gpu, workload),
        tiers=_tiers(args, gpu),
        network=Network(args.network, args.rdma),
        prices=_prices(args),
    )
    show(plan_report(plan), args)
    return Exit.OK


def _with_params(footprint: Footprint, args: argparse.Namespace) -> Footprint:
    if args.params is None:
        return footprint
    params = _billions("--params", args.params)
    active = (
        params if args.active_params is None else _billions("--active-params", args.active_params)
    )
    if active > params:
        raise UsageError("--active-params cannot be more than --params", code="bad_params")
    model = footprint.model
    # A shape given by flags says no query heads: as many as its KV heads is the least there can be.
    heads = model.attention_heads or max((layer.kv_heads for layer in model.attention), default=1)
    return replace(
        footprint,
        model=replace(model, params=params, active_params=active, attention_heads=heads),
    )


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


def _prefill(args: argparse.Namespace, footprint: Footprint, gpu: Gpu) -> Prefill:
    if args.prefill_tokens_per_s is not None:
        return measured_prefill(args.prefill_tokens_per_s)
    return estimated_prefill(footprint.model, gpu, args.gpus)


def _decode(args: argparse.Namespace, footprint: Footprint, gpu: Gpu, workload: Workload) -> Decode:
    if args.decode_ms is not None:
        return measured_decode(args.decode_ms)
    if not 1 <= args.batch <= _MOST_GPUS:
        raise UsageError(f"a batch of {args.batch} cannot be; use 1 or more", code="bad_batch")
    context = workload.prompt_tokens + workload.output_tokens // 2
    return estimated_decode(DecodeStep(footprint, gpu, args.gpus, args.batch, context))


def _tiers(args: argparse.Namespace, gpu: Gpu) -> list[TierSpeed]:
    """Defaults: DRAM is bound by the PCIe links of all GPUs, at worst by one core that copies and
    digests; NVMe is one drive of its day; the remote tier is bound by the network."""
    links = gpu.host_bytes_per_s * args.gpus
    copies = min(links, 12.6e9)
    dram = Quantity(links * 0.7 if links * 0.7 > copies else links, copies, links)
    wire = args.network * 1e9 / 8
    return [
        _tier(args, "dram", (dram, dram), within(50e-6, 0.8, 3), "the GPUs' PCIe links"),
        _tier(
            args,
            "nvme",
            (Quantity(6e9, 3e9, 12e9), Quantity(2.5e9, 1.5e9, 5e9)),
            within(500e-6, 0.6, 3),
            "one NVMe drive",
        ),
        _tier(
            args,
            "remote",
            (within(wire * 0.7, 0.5, 0.3), within(wire * 0.7, 0.5, 0.3)),
            within(2e-3, 0.8, 4),
            f"a network of {args.network:g} Gb/s",
        ),
    ]


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


def _prices(args: argparse.Namespace) -> Prices:
    for flag, value in (("--gpu-hour-price", args.gpu_hour_price), ("--kwh-price", args.kwh_price)):
        if value is not None and not 0 <= value < 1e6:
            raise UsageError(f"{flag} {value:g} is no price", code="bad_price")
    gpu_hour = Quantity(2.5, 1.5, 5.0)
    kwh = Quantity(0.12, 0.06, 0.30)
    said = []
    if args.gpu_hour_price is not None:
        gpu_hour = within(args.gpu_hour_price, 0, 0)
        said.append("GPU-hour as given")
    else:
        said.append("2.5 (1.5 to 5) a GPU-hour, as clouds rent them")
    if args.kwh_price is not None:
        kwh = within(args.kwh_price, 0, 0)
        said.append("kWh as given")
    else:
        said.append("0.12 (0.06 to 0.3) a kWh")
    return Prices(gpu_hour, kwh, ", ".join(said))

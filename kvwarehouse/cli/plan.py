"""`kvwarehouse plan`: what loading KV instead of computing it would bring, on given hardware."""

from __future__ import annotations

import argparse

from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.hardware_flags import (
    add_decode_flags,
    add_engine_flags,
    add_tier_flags,
    decode_from,
    gpu_from,
    prefill_from,
    remote_from,
    tiers_from,
    with_given_size,
)
from kvwarehouse.cli.model_flags import add_model_flags, footprint_from
from kvwarehouse.cli.output import add_report_output, print_report
from kvwarehouse.errors import UsageError
from kvwarehouse.planning.interval import Quantity, within
from kvwarehouse.planning.plan import Network, Plan, Prices, ServiceLoad
from kvwarehouse.planning.plan_report import plan_report

EXAMPLES = """\
  kvwarehouse plan --model llama-3.3-70b --gpu h100 --gpus 8
  kvwarehouse plan --model qwen2.5-7b --prefill-tokens-per-s 24000 --nvme-read 12GB --reuse 0.7
  kvwarehouse plan --model llama-3.3-70b --gpus 64 --prompt-tokens 4096 --network 400 --rdma --json

Rates are per second and of the whole host: --dram-read 40GB is 40 GB/s. `kvwarehouse bench`
measures those of this machine. docs/sizing.md has the formulas and the sources of what is assumed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    _add_workload(parser)
    add_engine_flags(parser)
    add_decode_flags(parser)
    add_tier_flags(parser, remote=True)
    _add_prices(parser)
    add_report_output(parser)


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


def _add_prices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prices, in any one currency")
    group.add_argument("--gpu-hour-price", type=float, help="Of one GPU (default: 1.5 to 5).")
    group.add_argument("--kwh-price", type=float, help="Of energy (default: 0.06 to 0.3).")


def run(args: argparse.Namespace) -> int:
    gpu = gpu_from(args)
    footprint = with_given_size(footprint_from(args), args)
    workload = ServiceLoad(
        args.prompt_tokens, args.output_tokens, args.requests_per_s, args.reuse, args.steady
    )
    plan = Plan(
        footprint=footprint,
        workload=workload,
        gpu=gpu,
        gpus=args.gpus,
        prefill=prefill_from(args, footprint, gpu),
        decode=decode_from(args, footprint, gpu, workload),
        tiers=[*tiers_from(args, gpu), remote_from(args)],
        network=Network(args.network, args.rdma),
        prices=_prices(args),
    )
    print_report(plan_report(plan), args)
    return Exit.OK


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

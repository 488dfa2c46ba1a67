"""`kvwarehouse size`: how large a model's KV is, and what fits."""

from __future__ import annotations

import argparse
from typing import Any

from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.model_flags import add_model_flags, footprint_from
from kvwarehouse.cli.output import add_report_output, print_json, print_report, print_table
from kvwarehouse.errors import UsageError
from kvwarehouse.model.catalogue import MODELS, find_model
from kvwarehouse.model.footprint import Footprint, Sharding, find_dtype
from kvwarehouse.planning.size import (
    DEFAULT_CONTEXTS,
    LONGEST_CONTEXT,
    GpuFit,
    PromptRate,
    SizeQuestion,
    TierLife,
    gpu_fit,
    size_report,
    tier_life,
)
from kvwarehouse.sizes import parse_size

EXAMPLES = """\
  kvwarehouse size --model llama-3.3-70b                  bytes per token and per context
  kvwarehouse size --config ./model/config.json --dtype fp8 --tp 8 --json
  kvwarehouse size --model llama-3.3-70b --gpu-memory 320GB --weights 140GB --users 50
  kvwarehouse size --model qwen2.5-7b --nvme 15TB --prompts-per-s 2 --prompt-tokens 8000
  kvwarehouse size --list                                 the models that are known by name

docs/sizing.md has the formulas and their sources.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="List the known models and stop.")
    add_model_flags(parser)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="Tensor-parallel ranks.")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="Pipeline stages.")
    parser.add_argument(
        "--context",
        type=int,
        action="append",
        metavar="TOKENS",
        help="Of a context to size; may be repeated (default: 1,000 to 1,000,000).",
    )
    parser.add_argument(
        "--page-tokens", type=int, default=256, metavar="N", help="Of a page (default: 256)."
    )
    _add_fit(parser)
    _add_tiers(parser)
    add_report_output(parser)


def _add_fit(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what fits on the GPUs")
    group.add_argument("--gpu-memory", metavar="SIZE", help="Of all GPUs together, such as 320GB.")
    group.add_argument("--weights", metavar="SIZE", help="Of the model's weights, all of them.")
    group.add_argument(
        "--reserve",
        metavar="SIZE",
        default="0",
        help="For activations and the engine (default: 0).",
    )
    group.add_argument("--users", type=int, default=1, metavar="N", help="Served at once.")


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how long tiers keep KV")
    group.add_argument("--dram", metavar="SIZE", help="Of the DRAM tier, such as 512GiB.")
    group.add_argument("--nvme", metavar="SIZE", help="Of the NVMe tier, such as 15TB.")
    group.add_argument("--prompts-per-s", type=float, metavar="RATE", help="Prompts a second.")
    group.add_argument("--prompt-tokens", type=int, metavar="N", help="Mean length of a prompt.")
    group.add_argument(
        "--output-tokens",
        type=int,
        default=0,
        metavar="N",
        help="Stored of an answer (default: 0).",
    )
    group.add_argument(
        "--reuse",
        type=float,
        default=0.0,
        metavar="PART",
        help="Of a prompt's tokens that are stored already, 0 to below 1 (default: 0).",
    )


def run(args: argparse.Namespace) -> int:
    if args.list:
        _list_models(args.json)
        return Exit.OK
    footprint = footprint_from(args)
    sharding = Sharding(args.tp, args.pp)
    contexts = tuple(sorted(set(args.context))) if args.context else DEFAULT_CONTEXTS
    _check_tokens("--context", contexts[0], contexts[-1])
    _check_tokens("--page-tokens", args.page_tokens, args.page_tokens)
    asked = SizeQuestion(
        footprint,
        sharding,
        contexts,
        args.page_tokens,
        _fit(args, footprint, sharding),
        _lives(args, footprint),
    )
    print_report(size_report(asked), args)
    return Exit.OK


def _check_tokens(flag: str, least: int, most: int) -> None:
    for value in (least, most):
        if not 1 <= value <= LONGEST_CONTEXT:
            raise UsageError(
                f"{flag} {value} cannot be; use 1 to {LONGEST_CONTEXT:,}", code="bad_tokens"
            )


def _fit(args: argparse.Namespace, footprint: Footprint, sharding: Sharding) -> GpuFit | None:
    if args.gpu_memory is None and args.weights is None:
        return None
    if args.gpu_memory is None or args.weights is None:
        raise UsageError("--gpu-memory and --weights belong together", code="missing_flag")
    return gpu_fit(
        parse_size(args.gpu_memory, name="--gpu-memory"),
        parse_size(args.weights, name="--weights"),
        footprint.all_ranks_bytes_per_token(sharding),
        users=args.users,
        reserve_bytes=parse_size(args.reserve, name="--reserve"),
    )


def _lives(args: argparse.Namespace, footprint: Footprint) -> list[TierLife]:
    tiers = [(tier, getattr(args, tier)) for tier in ("dram", "nvme")]
    if all(size is None for _, size in tiers):
        return []
    if args.prompts_per_s is None or args.prompt_tokens is None:
        raise UsageError(
            "--dram and --nvme need --prompts-per-s and --prompt-tokens", code="missing_flag"
        )
    rate = PromptRate(args.prompts_per_s, args.prompt_tokens, args.output_tokens, args.reuse)
    return [
        tier_life(tier, parse_size(size, name=f"--{tier}"), footprint.bytes_per_token, rate)
        for tier, size in tiers
        if size is not None
    ]


def _list_models(as_json: bool) -> None:
    listed = [_listed(name) for name in MODELS]
    if as_json:
        print_json({"models": listed})
        return
    print_table(
        "",
        ("model", ">layers", "kinds", "heads x dim", ">fp16 B/token", ">windows full", ">params"),
        [
            (
                each["model"],
                each["layers"],
                ", ".join(f"{count} {kind}" for kind, count in each["kinds"].items()),
                ", ".join(f"{one['kv_heads']} x {one['dim']}" for one in each["heads"]),
                each["fp16_bytes_per_token"],
                each["fp16_growing_bytes_per_token"],
                f"{each['params'] / 1e9:,.4g} B" if each["params"] else "unknown",
            )
            for each in listed
        ],
    )


def _listed(name: str) -> dict[str, Any]:
    model, known = find_model(name), MODELS[name]
    footprint = Footprint(model, find_dtype("fp16"))
    heads = dict.fromkeys((cache.kv_heads, cache.key_dim) for cache in model.attention)
    return {
        "model": name,
        "family": known.family,
        "source": known.source,
        "layers": len(model.layers),
        "kinds": model.kinds,
        "heads": [{"kv_heads": count, "dim": dim} for count, dim in heads],
        "fp16_bytes_per_token": footprint.bytes_per_token,
        "fp16_growing_bytes_per_token": footprint.growing_bytes_per_token,
        "state_bytes": footprint.state_bytes,
        "params": model.params or None,
    }

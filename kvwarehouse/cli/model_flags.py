"""Flags that say which model, in which number format: of `size`, `plan` and `replay`."""

from __future__ import annotations

import argparse

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import Architecture, uniform
from kvwarehouse.model.catalogue import find_model
from kvwarehouse.model.config import architecture_of, read_config
from kvwarehouse.model.footprint import DTYPES, Footprint, find_dtype


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model (one of --model, --config, --layers)")
    group.add_argument(
        "--model", metavar="NAME", help="Of the shipped table, such as llama-3.3-70b."
    )
    group.add_argument("--config", metavar="PATH", help="A config.json, or the folder it is in.")
    group.add_argument("--layers", type=int, metavar="N", help="Layers of a shape that you give.")
    group.add_argument("--kv-heads", type=int, metavar="N", help="Its KV heads in each layer.")
    group.add_argument("--head-dim", type=int, metavar="N", help="Its dimension of one head.")
    group.add_argument(
        "--dtype",
        default="fp16",
        metavar="NAME",
        help=f"Of the KV, not of the weights: {', '.join(DTYPES)} (default: fp16).",
    )
    group.add_argument(
        "--scale-group",
        type=int,
        metavar="N",
        help="Elements that share a scale; 0: one scale a tensor (default: by --dtype).",
    )
    group.add_argument(
        "--scale-bytes", type=int, metavar="N", help="Bytes of one scale (default: by --dtype)."
    )


def has_model(args: argparse.Namespace) -> bool:
    return any(each is not None for each in (args.model, args.config, args.layers))


def footprint_from(args: argparse.Namespace) -> Footprint:
    """Raises UsageError for an unknown model or an impossible shape."""
    dtype = find_dtype(args.dtype, scale_group=args.scale_group, scale_bytes=args.scale_bytes)
    return Footprint(_architecture(args), dtype)


def _architecture(args: argparse.Namespace) -> Architecture:
    given = [name for name in ("model", "config", "layers") if getattr(args, name) is not None]
    if len(given) != 1:
        which = " and ".join(f"--{name}" for name in given) or "no model"
        raise UsageError(
            f"{which} given; give one of --model NAME, --config PATH, or --layers N --kv-heads N"
            " --head-dim N",
            code="which_model",
        )
    if args.model is not None:
        return find_model(args.model)
    if args.config is not None:
        return architecture_of(read_config(args.config))
    if args.kv_heads is None or args.head_dim is None:
        raise UsageError("--layers also needs --kv-heads and --head-dim", code="which_model")
    return uniform(args.layers, args.kv_heads, args.head_dim)

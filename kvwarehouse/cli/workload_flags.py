"""Flags that say which workload, made of the catalogue: of `generate` and `drive`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvwarehouse.errors import UsageError
from kvwarehouse.workloads.call import Workload
from kvwarehouse.workloads.catalogue import KINDS, Setting, WorkloadKind

_MOST_PER_S = 1e6


@dataclass(frozen=True)
class Made:
    name: str
    kind: WorkloadKind
    workload: Workload


def workloads_listed() -> str:
    return "; ".join(f"{name}: {kind.summary}" for name, kind in KINDS.items())


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the workload (each has some of these)")
    group.add_argument(
        "--seed", type=int, default=None, metavar="N", help="Equal for equal traces (default: 0)."
    )
    group.add_argument(
        "--requests-per-s",
        type=float,
        default=None,
        metavar="RATE",
        help="Mean arrivals (default: the workload's).",
    )
    for name, users in _users().items():
        (first, *_) = users.values()
        choices = f" {', '.join(first.choices)}." if first.choices else ""
        defaults = dict.fromkeys(_shown(setting) for setting in users.values())
        said = f"{', '.join(users)}: {first.help}{choices} (default: {', '.join(defaults)})"
        group.add_argument(
            _flag(name),
            metavar="NAME" if first.choices else "F,..." if first.factors else "N",
            help=said.replace("%", "%%"),
        )


def workload_from(name: str, args: argparse.Namespace) -> Made:
    """Raises UsageError for a name, a flag or a value that does not belong."""
    kind = KINDS.get(name)
    if kind is None:
        raise UsageError(
            f"{name!r} is no workload; there are {', '.join(KINDS)}", code="no_workload"
        )
    settings = {each: setting.default for each, setting in kind.settings.items()}
    for each in _users():
        text = getattr(args, each)
        if text is None:
            continue
        if each not in settings:
            fitting = ", ".join(map(_flag, settings)) or "none beside --seed and --requests-per-s"
            raise UsageError(
                f"{_flag(each)} is not for {name}; its flags: {fitting}", code="bad_workload"
            )
        settings[each] = kind.settings[each].read(_flag(each), text)
    return Made(name, kind, kind.make(args.seed or 0, _rate(args, kind), settings))


def refuse_workload_flags(args: argparse.Namespace, why: str) -> None:
    """Where there is no workload to be told anything."""
    for each in ("seed", "requests_per_s", *_users()):
        if getattr(args, each) is not None:
            raise UsageError(f"{_flag(each)} is for workloads; {why}", code="bad_workload")


def _rate(args: argparse.Namespace, kind: WorkloadKind) -> float:
    given: float | None = args.requests_per_s
    if given is None:
        return kind.requests_per_s
    if not 0 < given <= _MOST_PER_S:
        raise UsageError(
            f"--requests-per-s {given:g} is no rate; use above 0, up to {_MOST_PER_S:,.0f}",
            code="bad_workload",
        )
    return given


def _users() -> dict[str, dict[str, Setting]]:
    """Of each setting, the workloads that have it."""
    users: dict[str, dict[str, Setting]] = {}
    for kind_name, kind in KINDS.items():
        for name, setting in kind.settings.items():
            users.setdefault(name, {})[kind_name] = setting
    return users


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(setting: Setting) -> str:
    if setting.factors:
        return ",".join(f"{each:g}" for each in setting.default)
    return f"{setting.default:,}" if isinstance(setting.default, int) else str(setting.default)

"""The commands of this package: name, one line for the list, and the module that does it.

A module has EXAMPLES (shown in its --help), add_arguments(parser) and run(args) -> exit status; it
is imported when its command is used, so that `kvwarehouse --help` is quick.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast


class CommandModule(Protocol):
    EXAMPLES: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Command:
    name: str
    summary: str

    def load(self) -> CommandModule:
        return cast(CommandModule, import_module(f"kvwarehouse.cli.{self.name}"))


def command_parser(name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """What every command's arguments are read with; those of another package may use it too."""
    parser = argparse.ArgumentParser(
        prog=f"kvwarehouse {name}",
        description=summary,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # No option but -h has a single dash: what begins with one is a value, to be judged as such.
    parser._negative_number_matcher = re.compile("-(?!-)")
    return parser


COMMANDS = (
    Command("serve", "Run the daemon of this host."),
    Command("status", "Show a running warehouse: tiers, hits, health."),
    Command("ls", "List its namespaces, or the pages of one."),
    Command("route", "Say which of several warehouses a request should go to."),
    Command("clear", "Remove all pages of a namespace from all tiers; erases no bytes."),
    Command("evict", "Take the coldest pages out of a tier."),
    Command("flush", "Wait until what is stored is durable on NVMe."),
    Command("drain", "Refuse stores from now on and flush, before a stop."),
    Command("check", "Verify the digests of stored pages."),
    Command("size", "Say how large a model's KV is, and what fits where."),
    Command("plan", "Say what loading KV instead of computing it would bring."),
    Command("advise", "Say what more or less DRAM and NVMe would bring a running warehouse."),
    Command("replay", "Say what tiers of given sizes would hit on a recorded trace."),
    Command("generate", "Write a workload like those of published traces, as a trace."),
    Command("drive", "Send a trace or a workload to an engine or a daemon, and time it."),
)

"""The commands: those of this package, and those that other packages add.

Of ours there is the name, one line for the list, and the module that does it, of the same name (and
an underscore where Python has a word of that name: import_.py). A module has EXAMPLES
(shown in its --help), add_arguments(parser) and run(args) -> exit status; it is imported when its
command is used, so that `kvwarehouse --help` is quick.

Others come through the entry point group `kvwarehouse.commands`. An entry point's name is the
command; its object is called with the arguments after the name (a list of str, --help among them)
and returns the exit status (None is 0). A package that is broken or lacks an extra costs its own
command, with one clear line, and nothing else. The list of commands shows the text that the
object's module assigns to SUMMARY, a plain string on the module's top level. It is read from the
source: importing an extension for its help alone could import all of an engine.
"""

from __future__ import annotations

import argparse
import ast
import keyword
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from kvwarehouse.errors import UsageError, WarehouseError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kvwarehouse.commands"
SUMMARY = "SUMMARY"
_NO_SUMMARY = "(of an installed extension)"

_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class CommandModule(Protocol):
    EXAMPLES: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Command:
    name: str
    summary: str

    def load(self) -> CommandModule:
        module = f"{self.name}_" if keyword.iskeyword(self.name) else self.name
        return cast(CommandModule, import_module(f"kvwarehouse.cli.{module}"))


def command_parser(name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """What every command's arguments are read with; those of another package may use it too."""
    parser = argparse.ArgumentParser(
        prog=f"kvwarehouse {name}",
        description=summary,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # No option but -h, and -o of debug, has a single dash: what begins with one is a value, to be
    # judged as such.
    parser._negative_number_matcher = re.compile("-(?!-)")
    return parser


COMMANDS = (
    Command("serve", "Run the daemon of this host."),
    Command("status", "Show a running warehouse: tiers, hits, health."),
    Command("top", "Watch a running warehouse: rates, hits, tiers, what fails."),
    Command("ls", "List its namespaces, or the pages of one."),
    Command("why", "Say why the pages of a prompt are found or not."),
    Command("keep", "Have the pages of a prompt stay, for a time; list and end that."),
    Command("route", "Say which of several warehouses a request should go to."),
    Command("clear", "Remove all pages of a namespace from all tiers; erases no bytes."),
    Command("evict", "Take the coldest pages out of a tier."),
    Command("flush", "Wait until what is stored is durable on NVMe."),
    Command("drain", "Refuse stores from now on and flush, before a stop."),
    Command("check", "Verify the digests of stored pages."),
    Command("debug", "Make one file for a bug report: daemon, log, host; no secrets."),
    Command("export", "Write its pages into a file, for a backup or another warehouse."),
    Command("import", "Store the pages that `kvwarehouse export` wrote, in any warehouse."),
    Command("remote", "Try, count and clean the store that the daemons of a fleet share."),
    Command("size", "Say how large a model's KV is, and what fits where."),
    Command("plan", "Say what loading KV instead of computing it would bring."),
    Command("advise", "Say what more or less DRAM and NVMe would bring a running warehouse."),
    Command("replay", "Say what tiers of given sizes would hit on a recorded trace."),
    Command("generate", "Write a workload like those of published traces, as a trace."),
    Command("drive", "Send a trace or a workload to an engine or a daemon, and time it."),
)


def find_plugins() -> dict[str, EntryPoint]:
    """Command to entry point, sorted by name. Loads nothing."""
    from importlib import metadata  # a fifteenth of a daemon's start, which asks for no plugin

    found = metadata.entry_points(group=GROUP)
    return {point.name: point for point in sorted(found, key=lambda point: point.name)}


def summary_of(point: EntryPoint) -> str:
    """The line for the list of commands. Imports nothing; never raises for a broken package."""
    try:
        spec = _spec_without_import(point.module)
        source = Path(spec.origin).read_bytes() if spec and spec.origin else b""
        return _constant(ast.parse(source), SUMMARY) or _NO_SUMMARY
    except (ImportError, OSError, SyntaxError, ValueError):
        return _NO_SUMMARY


def run_plugin(point: EntryPoint, arguments: list[str]) -> int:
    """Runs the command. Raises UsageError where it cannot be loaded; what the command itself raises
    is its own."""
    return int(_load(point)(arguments) or 0)


def _spec_without_import(module: str) -> ModuleSpec | None:
    """find_spec would import the packages around `module`; their folders are searched instead."""
    top, *inner = module.split(".")
    spec = find_spec(top)
    for place, _ in enumerate(inner, 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = ".".join([top, *inner[:place]])
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _constant(tree: ast.Module, name: str) -> str | None:
    """The plain string that a module assigns to `name`."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and [ast.unparse(target) for target in node.targets] == [name]
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            return node.value.value
    return None


def _load(point: EntryPoint) -> Callable[[list[str]], int | None]:
    try:
        command = point.load()
    except ModuleNotFoundError as error:
        raise _missing(point, error.name or str(error)) from error
    except WarehouseError:
        raise
    except Exception as error:
        raise UsageError(
            f"the command {point.name} of {_owner(point)} cannot be loaded:"
            f" {type(error).__name__}: {error}; reinstall or remove that package",
            code="broken_command",
        ) from error
    if not callable(command):
        raise UsageError(
            f"the command {point.name} of {_owner(point)} is {point.value}, which cannot be called;"
            " the package is broken, upgrade it",
            code="broken_command",
        )
    return cast(Callable[[list[str]], int | None], command)


def _missing(point: EntryPoint, module: str) -> UsageError:
    package = _owner(point)
    extra = _extra_with(module, (point.dist.requires or ()) if point.dist else ())
    fix = f"pip install '{package}[{extra}]'" if extra else f"install what {package} asks for"
    return UsageError(
        f"the command {point.name} needs the module {module}, which is not installed; {fix}",
        code="missing_extra",
        context={"module": module, "package": package},
    )


@contextmanager
def daemon_extra(command: str) -> Iterator[None]:
    """Around the import of the daemon's modules. Raises UsageError (code "missing_extra") in an
    installation without what they need, which is the extra "daemon"."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvwarehouse"):
            raise
        raise UsageError(
            f"{command} needs the module {error.name}, which is not installed; run"
            " pip install 'kvwarehouse[daemon]'",
            code="missing_extra",
        ) from error


def _extra_with(module: str, requirements: Iterable[str]) -> str | None:
    """The extra of a package that installs `module`, by the names in its metadata."""
    top = module.partition(".")[0].replace("_", "-").lower()
    for requirement in requirements:
        name, extra = _NAME.match(requirement), _EXTRA.search(requirement)
        if name and extra and name[0].replace("_", "-").lower() == top:
            return extra[1]
    return None


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module

"""From arguments to an exit status: the one place that turns errors into text."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvwarehouse.cli.commands import (
    COMMANDS,
    Command,
    command_parser,
    find_plugins,
    run_plugin,
    summary_of,
)
from kvwarehouse.cli.exit_codes import MEANINGS, Exit, exit_code_of
from kvwarehouse.cli.variables import warn_of_variables
from kvwarehouse.errors import WarehouseError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_ABOUT = """A warehouse for the KV cache of LLM inference: it keeps what an engine computed for a
prompt in DRAM and on NVMe, and hands it back faster than it can be computed again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status (exit_codes.py). Errors go to stderr, one line
    and never a traceback for what a user can cause."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A model's name may have letters that the terminal's or the pipe's encoding has not.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _status_of(given)
        finally:
            if sys.stdout is not None:  # as under `>&-`
                sys.stdout.flush()  # here, where what goes wrong with it is one line
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        _drop_output()
        # Not OK: `set -o pipefail; kvwarehouse check | head && deploy` must not go on over damage.
        return Exit.NO_READER
    except OSError as error:
        if error.errno not in _UNWRITTEN:
            raise
        _drop_output()
        print(
            f"kvwarehouse: the output cannot be written: {error.strerror}; make room for it, or"
            " send it elsewhere",
            file=sys.stderr,
        )
        return Exit.FAILED


_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _drop_output() -> None:
    """The interpreter must not complain at its end of what it could not write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _status_of(given: list[str]) -> int:
    try:
        return _run(given)
    except WarehouseError as error:
        print(f"kvwarehouse: {error} [{error.code}]", file=sys.stderr)
        return exit_code_of(error)


def _run(given: list[str]) -> int:
    own = {command.name: command for command in COMMANDS}
    name = given[0] if given else ""
    if name in own:
        return _run_own(own[name], given[1:])
    plugins = find_plugins()
    if name in plugins:
        warn_of_variables()
        return run_plugin(plugins[name], given[1:])
    parser = _parser(plugins)
    if not given:
        parser.print_help(sys.stderr)
        return Exit.USAGE
    command = next((word for word in given if word in own or word in plugins), "")
    if command and name.startswith("-") and name not in ("-h", "--help", "--version"):
        parser.error(f"{name} belongs after the command: kvwarehouse {command} {name} ...")
    parser.parse_args(given)
    return Exit.OK


def _run_own(command: Command, given: list[str]) -> int:
    module = command.load()
    parser = command_parser(command.name, command.summary, module.EXAMPLES)
    module.add_arguments(parser)
    args = parser.parse_args(given)
    if command.name != "serve":  # which has a log for it
        warn_of_variables()
    return int(module.run(args))


def _parser(plugins: Mapping[str, EntryPoint]) -> argparse.ArgumentParser:
    """Of the program itself: its help, its version, and the refusal of unknown commands."""
    listed = [f"  {command.name:<10} {command.summary}" for command in COMMANDS]
    listed += [f"  {name:<10} {summary_of(point)}" for name, point in plugins.items()]
    codes = [f"  {int(code):<10} {meaning}" for code, meaning in MEANINGS.items()]
    parser = argparse.ArgumentParser(
        prog="kvwarehouse",
        usage="kvwarehouse COMMAND [ARGUMENT ...]",
        description=_ABOUT,
        epilog="\n".join(
            [
                "commands (each has --help, with examples):",
                *listed,
                "",
                "exit status:",
                *codes,
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvwarehouse {_version()}")
    parser.add_argument(
        "command",
        metavar="COMMAND",
        choices=[command.name for command in COMMANDS] + list(plugins),
        help=argparse.SUPPRESS,
    )
    return parser


def _version() -> str:
    from importlib import metadata  # as in commands.py

    try:
        return metadata.version("kvwarehouse")
    except metadata.PackageNotFoundError:
        return "(not installed)"

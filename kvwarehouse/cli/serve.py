"""`kvwarehouse serve`: the daemon, in the foreground."""

from __future__ import annotations

import argparse
import os
import sys

from kvwarehouse import config
from kvwarehouse.cli.commands import daemon_extra
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.variables import warn_of_variables
from kvwarehouse.errors import UsageError

EXAMPLES = """\
  kvwarehouse serve                                   DRAM only, an eighth of memory
  kvwarehouse serve --dram 64GiB --nvme-dir /nvme/kvw --nvme-capacity 1TB
  kvwarehouse serve --config /etc/kvwarehouse.toml --print-config
  kvwarehouse serve --listen 0.0.0.0:7070 --tls-cert c.pem --tls-key k.pem --token-file tokens
  kvwarehouse serve --fleet-secret secret --dram 64GiB   keys as on all hosts that have this file

Settings: flags, over environment (KVW_DRAM=64GiB), over the file, over defaults; all are read
once. SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGALRM and the like drain: no more stores, a flush, exit
0; a second SIGTERM or SIGINT ends at once. With --listen SIGHUP reads --token-file, --tls-cert and
--tls-key anew instead. The DRAM tier stays in --arena-dir for the next start.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    try:
        settings = config.load(vars(args))
    except UsageError as error:
        warn_of_variables()  # one of them may be why
        if not args.print_config:
            _log_refusal(args, error)
        raise
    if args.print_config:
        warn_of_variables()  # a daemon says it in its log
        sys.stdout.write(config.print_config(settings))
        return Exit.OK
    if settings.listen:
        # For much that strangers say gRPC writes a line, which is no JSON and has bytes of theirs
        # in it. It reads whether it may when it is imported, which the daemon is the first to do.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with daemon_extra("serve"):
        from kvwarehouse import daemon
    return int(daemon.serve(settings, manager=daemon.ServiceManager.of_environment(os.environ)))


def _log_refusal(args: argparse.Namespace, error: UsageError) -> None:
    """As an event, which is what whoever reads a daemon's log looks for; main.py says it to people.
    What the file says of the log's form is not known: it may be what is wrong."""
    try:
        from kvwarehouse.daemon.logs import Event, Log
    except ModuleNotFoundError:
        return  # an installation without a daemon has no log
    form = args.log_format or os.environ.get("KVW_LOG_FORMAT", "")
    log = Log(form if form in ("json", "text") else "auto")
    log.event(Event.START_REFUSED, code=error.code, text=error.message)

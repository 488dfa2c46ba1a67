"""`kvwarehouse debug bundle`: one file for a bug report."""

from __future__ import annotations

import argparse
import os
import sys
import time

from kvwarehouse.bundle import Bundle, BundleRequest, make_bundle
from kvwarehouse.cli.connection import add_connection, address_from, is_local, token_from
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json, print_table
from kvwarehouse.client.endpoint import checked_timeout

_PATIENCE_S = 5.0

EXAMPLES = """\
  kvwarehouse debug bundle
  kvwarehouse debug bundle --socket /run/kvw/kvw.sock -o report.tar.gz
  kvwarehouse debug bundle --config /etc/kvwarehouse.toml --log /var/log/kvw.log    of a daemon
                                                                  that does not run any more
  kvwarehouse debug bundle --engine vllm          with what `kvwarehouse doctor vllm` says

The bundle has versions, the daemon's process, settings, status, metrics and the end of its log,
facts of the host, and what the doctor says. Whether the daemon serves, hangs or does not run, there
is a bundle, and it says what it could not get. Each part has a deadline. Run it on the daemon's
host, as its user.

Tokens, secrets, token ids, salts and KV are left out. Paths, addresses, the names of models and
of this host stay in: read it before you send it. Only you can read the file (0600).

The log is known where the daemon writes it into a file, or the systemd journal has it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=["bundle"], metavar="bundle", help="The one thing to make: a bundle."
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="Where to write it; a file that is there is kept."
        " Default: kvwarehouse-bundle-TIME.tar.gz here.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="The settings of a daemon that does not run, as `serve` takes them.",
    )
    parser.add_argument(
        "--log", metavar="FILE", help="The daemon's log, if it is in a file that is not found."
    )
    parser.add_argument(
        "--engine",
        metavar="ENGINE",
        help="Also what `kvwarehouse doctor ENGINE` says: up to two minutes more.",
    )
    add_connection(parser, timeout_s=_PATIENCE_S)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    address = address_from(args, os.environ)
    asked = BundleRequest(
        address=address,
        token=None if is_local(address) else token_from(args.token_file, os.environ),
        tls=args.tls,
        timeout_s=checked_timeout(args.timeout, "--timeout"),
        config=args.config and os.path.abspath(args.config),
        name=args.name,
        log=args.log,
        engine=args.engine,
    )
    made = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = os.path.abspath(args.output or f"kvwarehouse-bundle-{made}.tar.gz")
    shows = sys.stderr.isatty() and not args.json
    bundle = make_bundle(
        asked, os.environ, path, on_source=_show_progress if shows else lambda what: None
    )
    if args.json:
        print_json(bundle.figures)
    else:
        _print(bundle)
    return Exit.OK


def _show_progress(what: str) -> None:
    print(f"\r\x1b[K{what} ...", end="", file=sys.stderr, flush=True)


def _print(bundle: Bundle) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    rows = [
        (each.name, each.size_bytes, f"{each.took_s:.1f} s", each.what)
        if not each.problem
        else (each.name, "-", f"{each.took_s:.1f} s", f"not there: {each.problem}")
        for each in bundle.members
    ]
    print_table("", ("file", ">bytes", ">took", "what"), rows)
    print(f"\n{bundle.path}: {bundle.size_bytes:,} bytes, for you alone to read (0600)")
    print("secrets were left out; it has paths, addresses and names of models: read it before you")
    print("send it")
